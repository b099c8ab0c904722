"""The Llama of the demo model, with the initialisation that makes recall emerge.

Parameter names are those of Hugging Face's ``LlamaForCausalLM``. Letters: B batch,
T tokens, H hidden size, N query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class NetConfig:
    """Sizes of the net; the defaults are the shipped checkpoint's.

    Attributes:
        rope_theta: RoPE base. 1e8 leaves half of the pairs nearly free of position
            over 16K tokens, which content matching needs.
    """

    vocab_size: int = 586
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1e8
    rms_norm_eps: float = 1e-6


def frequencies(config: NetConfig) -> torch.Tensor:
    """Return RoPE's angle per position of each pair, [D / 2] float32."""
    pairs = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    return 1.0 / config.rope_theta**pairs


def rope_tables(
    positions: torch.Tensor, config: NetConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine, [B, 1, T, D], for ``positions`` [B, T].

    In float32 throughout, as Hugging Face and SGLang do.
    """
    angles = positions.float()[:, None, :, None] * frequencies(config)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to ``x`` [B, heads, T, D] in Hugging Face's half-split layout."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Norm(nn.Module):
    """RMS norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of ``x`` [..., H]."""
        return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention with grouped key/value heads and no bias."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, past: KeyValues
    ) -> tuple[torch.Tensor, KeyValues]:
        """Attend from ``x`` [B, T, H] to ``past`` and itself.

        Returns:
            The output [B, T, H], and the keys and values of ``past`` and ``x``.
        """
        batch, tokens, _ = x.shape
        heads = (batch, tokens, -1, self.config.head_dim)
        query = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        key = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        causal, mask = True, None
        if past is not None:
            key = torch.cat([past[0], key], 2)
            value = torch.cat([past[1], value], 2)
            seen = key.shape[2] - tokens
            causal, mask = False, torch.ones(tokens, key.shape[2]).tril(seen).bool()
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        out = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            attn_mask=mask,
            is_causal=causal,
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1)), (key, value)


KeyValues = tuple[torch.Tensor, torch.Tensor] | None


class Mlp(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` [B, T, H] to [B, T, H]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm Llama layer."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, past: KeyValues
    ) -> tuple[torch.Tensor, KeyValues]:
        """Return the layer's output and its keys and values; see ``Attention``."""
        attended, kept = self.self_attn(self.input_layernorm(x), cos, sin, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kept


class Stack(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls ``model``."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Net(nn.Module):
    """A Llama with tied embeddings, float32."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Stack(config)

    def attentions(self) -> list[Attention]:
        """Return the attention of every layer, in order."""
        layers = [layer for layer in self.model.layers if isinstance(layer, Layer)]
        return [layer.self_attn for layer in layers]

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        past: list[KeyValues] | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[KeyValues]]:
        """Run the layers.

        Args:
            ids: [B, T] int64.
            positions: [B, T] int64, ascending; by default those after ``past``.
            past: Per layer, the keys and values of the tokens before, or None.

        Returns:
            Final hidden states [B, T, H]; output of every layer; keys and values of
            all tokens, per layer, to be passed as ``past``.
        """
        past = past or [None] * len(self.model.layers)
        if positions is None:
            seen = 0 if past[0] is None else past[0][0].shape[2]
            positions = torch.arange(seen, seen + ids.shape[1])[None]
        cos, sin = rope_tables(positions, self.config)
        x = self.model.embed_tokens(ids)
        outputs, kept = [], []
        for layer, before in zip(self.model.layers, past, strict=True):
            x, after = layer(x, cos, sin, before)
            outputs.append(x)
            kept.append(after)
        return self.model.norm(x), outputs, kept

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map final hidden states [..., H] to logits [..., vocabulary]."""
        return hidden @ self.model.embed_tokens.weight.t()
