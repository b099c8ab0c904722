"""Plain Llama weights that start with a short convolution, matching and copying.

From a random start the model learns the answer's template and stays there; with
this start the lookup of fields appears within about a million tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from demo_model.net import frequencies

if TYPE_CHECKING:
    from demo_model.net import Attention, Net, NetConfig

EMBED_STD = 0.05
CONSTANT = 0.15  # embedding coordinate 0, the same in every token
SHIFT_LOGIT = 10.0  # attention logit of layer 0 at its own offset
SHIFT_PAIRS = 7  # RoPE pairs, the fastest ones, that encode the offset
COPY_GAIN = 0.045  # of W_o on what W_v read


@torch.no_grad()
def initialise(net: Net, seed: int) -> None:
    """Fill all weights of ``net`` in place, deterministic by ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    fill_random(net, generator)
    embed_constant(net)
    shift_heads(net, generator)
    for attention in net.attentions()[1:]:
        match_and_copy(attention, net.config, generator)


def fill_random(net: Net, generator: torch.Generator) -> None:
    """Draw every matrix; residual writers small, norms stay at one."""
    for name, weight in net.named_parameters():
        if weight.dim() != 2:
            continue
        std = 0.6 / math.sqrt(weight.shape[1])
        if "embed" in name:
            std = EMBED_STD
        elif "o_proj" in name or "down_proj" in name:
            std = 0.08 / math.sqrt(weight.shape[1])
        weight.normal_(std=std, generator=generator)


def embed_constant(net: Net) -> None:
    """Give embeddings equal norms and a constant coordinate 0."""
    weight = net.model.embed_tokens.weight
    weight[:, 0] = 0
    scale = EMBED_STD * math.sqrt(net.config.hidden_size)
    weight.copy_(functional.normalize(weight, dim=-1) * scale)
    weight[:, 0] = CONSTANT


def shift_heads(net: Net, generator: torch.Generator) -> None:
    """Make query head j of layer 0 attend to the token j + 1 back."""
    config, attention = net.config, net.attentions()[0]
    size, dim = config.hidden_size, config.head_dim
    speeds = frequencies(config)[:SHIFT_PAIRS]
    normed = math.sqrt(size) * CONSTANT / math.hypot(CONSTANT, EMBED_STD * size**0.5)
    gain = math.sqrt(SHIFT_LOGIT * math.sqrt(dim)) / normed
    attention.q_proj.weight.mul_(0.1)
    attention.k_proj.weight.mul_(0.1)
    for head in range(config.num_key_value_heads):
        start = head * dim
        attention.k_proj.weight[start : start + SHIFT_PAIRS, 0] = gain
    for head in range(config.num_attention_heads):
        start, phase = head * dim, -(head + 1) * speeds
        sine = start + dim // 2
        attention.q_proj.weight[start : start + SHIFT_PAIRS, 0] = gain * phase.cos()
        attention.q_proj.weight[sine : sine + SHIFT_PAIRS, 0] = gain * phase.sin()
        basis = torch.linalg.qr(torch.randn(size, dim, generator=generator))[0]
        attention.o_proj.weight[:, start : start + dim] = 0.04 * basis
    torch.nn.init.orthogonal_(attention.v_proj.weight, generator=generator)


def match_and_copy(
    attention: Attention, config: NetConfig, generator: torch.Generator
) -> None:
    """Set W_q = W_k on the slow RoPE pairs, and W_o proportional to W_v transposed."""
    size, dim = config.hidden_size, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    slow = torch.arange(dim // 4, dim // 2)
    slow = torch.cat([slow, slow + dim // 2])
    values = config.num_key_value_heads * dim
    if values > size:
        raise ValueError(f"{values} value features do not fit hidden size {size}")
    for head in range(config.num_key_value_heads):
        basis = torch.linalg.qr(torch.randn(size, len(slow), generator=generator))[0]
        attention.k_proj.weight[head * dim + slow] = basis.t()
        for query in range(head * group, (head + 1) * group):
            attention.q_proj.weight[query * dim + slow] = basis.t()
    basis = torch.linalg.qr(torch.randn(size, values, generator=generator))[0].t()
    attention.v_proj.weight.copy_(basis)
    for query in range(config.num_attention_heads):
        start = query // group * dim
        attention.o_proj.weight[:, query * dim : (query + 1) * dim] = (
            COPY_GAIN * basis[start : start + dim].t()
        )
