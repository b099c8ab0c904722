"""The most bytes a server has at once while it serves; see ``real_tensors.py``."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from real_tensors import BF16, META, geometry, peak, total

from vericache_sglang.compression.base import QueryTail, Seen
from vericache_sglang.kv.split_layers import INDICES


class Fused(torch.nn.Module):
    """What SGLang's CUDA kernels allocate in place of a norm, an activation, a rope."""

    def __init__(self, allocate):
        super().__init__()
        self.forward = allocate


def prefill_activations(at):
    from sglang.srt.models.llama import LlamaDecoderLayer
    from transformers import LlamaConfig

    model = at.model
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.mlp // at.ranks,
        num_hidden_layers=2,
        num_attention_heads=model.heads // at.ranks,
        num_key_value_heads=model.kv_heads // at.ranks,
        head_dim=model.head_dim,
        max_position_embeddings=512,
    )
    in_place = Fused(lambda x, residual, **options: (x, residual))
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, layer_id=1).to(BF16).requires_grad_()
        layer.input_layernorm = layer.post_attention_layernorm = in_place
        layer.mlp.act_fn = Fused(lambda x: x.new_empty(len(x), x.shape[1] // 2))
        layer.self_attn.rotary_emb = Fused(lambda positions, q, k: (q, k))
        layer.self_attn.attn = Fused(lambda q, k, v, batch: torch.empty_like(q))
        positions = torch.zeros(at.chunk, dtype=torch.int64)
        x = torch.empty(at.chunk, model.hidden, dtype=BF16)
        residual = torch.empty_like(x)
    found = peak(lambda: layer(positions, x, None, residual), layer, positions)
    return found + total([x, residual])


def prefill_logits(at):
    rows = min(at.running, at.chunk)
    hidden = torch.empty(rows, at.model.hidden, dtype=BF16, device=META)
    head = torch.empty(at.model.vocab, at.model.hidden, dtype=BF16, device=META)
    # LogitsProcessor._compute_lm_head and _copy_logits_to_buffer.
    return peak(lambda: torch.matmul(hidden, head.T).float(), hidden, head)


def sampling_copies(at):
    from sglang.srt.layers.sampler import multinomial_with_seed

    from vericache_sglang.sampling.rejection import filtered_probs

    config = at.config
    others = at.running * (1 + config.proposals)
    mixed = others + min(at.running, config.max_verifies) * config.draft_length
    with torch.device("meta"):
        logits = torch.empty(mixed, at.model.vocab)
        at_query = torch.zeros(mixed, dtype=torch.int64)
        one = torch.ones(mixed)

    def choose():  # as RowSampler._grouped, groups and RowSampler._tokens
        picked = logits[at_query]
        group = picked[at_query]
        probs = torch.softmax(group / one[:, None], dim=-1)
        cut = filtered_probs(probs, at_query, one, one)
        multinomial_with_seed(torch.log(cut), at_query, at_query)

    return peak(choose, logits, at_query, one)


def compressed_layer(at):
    """Bytes while a prompt as long as the context is compressed, layer by layer."""
    from vericache_sglang.compression.catalog import create_compressor
    from vericache_sglang.prefix_cache import compress as module

    model, context = at.model, at.context
    heads = model.heads // at.ranks
    shape = context, model.kv_heads // at.ranks, model.head_dim
    # As many layers as are ranked at once, and one more.
    layers = min(model.layers, 1 + max(1, INDICES // (shape[0] * shape[1])))
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        k, v = ([torch.empty(shape, dtype=BF16) for _ in range(layers)] for _ in "kv")
        tail = QueryTail(torch.empty(heads, 64, model.head_dim, dtype=BF16), context)
        row = torch.zeros(context, dtype=torch.int32)
        for name in ("leave_tree", "free", "relist"):
            patch.setattr(module, name, lambda *args: None)
        kept = torch.empty(int(context * at.config.keep), dtype=torch.int64)
        patch.setattr(module, "allocate", lambda tree, slots: kept[:slots])
        patch.setattr(module.PromptCompressor, "_enter", lambda *args: None)
        places = SimpleNamespace(
            geometry=geometry(at, layers),
            pool=SimpleNamespace(k_buffer=k, v_buffer=v),
            host=SimpleNamespace(
                fits_residual=lambda budget: True,
                open=lambda rid, budget: SimpleNamespace(describe=lambda *args: None),
                settle=lambda rid: None,
            ),
            row=lambda state: row,
            # As pick_entries on a GPU: keys and values of the kept tokens.
            pick=lambda layer, slots, index: tuple(
                side[layer].new_empty(index.shape[1], *shape[1:]) for side in (k, v)
            ),
            transfers=SimpleNamespace(save=lambda blocks, into: list(map(len, blocks))),
            put=lambda *args: None,
        )
        selector = create_compressor("snapkv", 0).selector
        segments = SimpleNamespace(
            active=False,
            settle=list,
            kept_back=lambda names: nullcontext(),
            copies=SimpleNamespace(give_scores=lambda *args: None),
        )
        splitter = module.PromptCompressor(
            at.config, selector, None, places, segments, shareable=False
        )
        kv = SimpleNamespace(cache_protected_len=0)
        state = SimpleNamespace(
            req=SimpleNamespace(kv=kv, skip_radix_cache_insert=True),
            rid="a",
            parts=None,
            residency=None,
            prompt=context,
            split=SimpleNamespace(shared_count=0),
        )
        budget = splitter.budget(context)
        seen = Seen(tail=tail, noted=None)
        return peak(
            lambda: splitter.to_host(state, None, budget, lambda layer: seen),
            *(*k, *v, tail.rows, row),
        )


def draft_kv(at):
    """Bytes of a prompt's draft KV in every layer, as ``PromptCompressor`` picks it."""
    from vericache_sglang.compression.budget import budget_for
    from vericache_sglang.kv.split_layers import pick

    model = at.model
    kept = budget_for(at.context, at.config.keep, 4, 32, at.page).kept
    heads = model.kv_heads // at.ranks
    layer = torch.empty(at.context, heads, model.head_dim, dtype=BF16, device=META)
    index = torch.zeros(heads, kept, dtype=torch.int64, device=META)
    return 2 * model.layers * pick(layer, index).nbytes


def swapped_layer(at):
    shape = at.context, at.model.kv_heads // at.ranks, at.model.head_dim
    source = torch.empty(shape, dtype=BF16, device=META)
    # StreamTransfers.restore: a layer's keys, then its values.
    return peak(lambda: (source.clone(), source.clone()), source)
