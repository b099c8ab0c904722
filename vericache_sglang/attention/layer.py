"""Shared by our attention backends: feature checks and KV writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

BACKEND_NAME = "vericache"
"""Name of our backends for SGLang's ``--attention-backend``."""


def refuse_pool(model_runner: ModelRunner) -> None:
    """Refuse a pool in which a slot holds different tokens in different layers.

    Raises:
        ValueError: The pool stores the KV of sliding-window layers separately.
    """
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if isinstance(model_runner.token_to_kv_pool, SWAKVPool):
        raise ValueError("attention backend vericache: no sliding-window KV pools")


def refuse_layer(layer: RadixAttention, features: dict[str, Any]) -> None:
    """Refuse a layer that needs more than causal full attention.

    Args:
        layer: SGLang's attention layer.
        features: Further inputs of special layers; all must be None.

    Raises:
        ValueError: The layer needs attention that is not causal and full.
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
        layer: Gives the layer index.
        batch: Gives the slots.
        kv: [T, H, D] each, or None if another layer's KV is shared.
    """
    k, v = kv
    if k is None or v is None:
        return
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
