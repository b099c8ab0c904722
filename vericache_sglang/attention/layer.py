"""What our attention backends share: what they refuse, and how new KV is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

BACKEND_NAME = "vericache"
"""What SGLang's ``--attention-backend`` calls them."""


def refuse_pool(model_runner: ModelRunner) -> None:
    """Refuse a pool whose slots are not the same tokens in every layer.

    Raises:
        ValueError: The pool keeps KV of sliding-window layers apart.
    """
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if isinstance(model_runner.token_to_kv_pool, SWAKVPool):
        raise ValueError("attention backend vericache: no sliding-window KV pools")


def refuse_layer(layer: RadixAttention, features: dict[str, Any]) -> None:
    """Refuse what would otherwise be computed as plain causal attention.

    Args:
        layer: SGLang's.
        features: Further inputs of special layers; None is none.

    Raises:
        ValueError: The layer asks for attention other than causal and full.
    """
    window = layer.sliding_window_size
    asked = {
        "cross attention": layer.is_cross_attention,
        f"{layer.attn_type.value} attention": layer.attn_type.value != "decoder",
        "sliding window": window is not None and window > -1,
        "logit_cap": layer.logit_cap != 0,
        "temperature scaling by position": layer.xai_temperature_len > 0,
        "V heads wider or narrower than K": layer.qk_head_dim != layer.v_head_dim,
    }
    asked |= {name: value is not None for name, value in features.items()}
    refused = [name for name, on in asked.items() if on]
    if refused:
        raise ValueError(
            f"attention backend vericache, layer {layer.layer_id}: "
            f"no {', '.join(refused)}"
        )


def store_kv(
    pool: Any,
    layer: RadixAttention,
    batch: ForwardBatch,
    kv: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Write K and V of the new tokens to ``batch.out_cache_loc``.

    Args:
        pool: SGLang's KV pool.
        layer: Names the layer.
        batch: Says where.
        kv: [T, H, D] each, or None where another layer's KV is shared.
    """
    k, v = kv
    if k is None or v is None:
        return
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
