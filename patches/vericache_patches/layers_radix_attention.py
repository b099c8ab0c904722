"""Hook on ``sglang/srt/layers/radix_attention.py``: queries and keys of a forward."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def forward(
    original: Hook,
    layer: Any,
    q: Any,
    k: Any,
    v: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Pass queries and keys to the layer's observer, then compute attention.

    If the observer returns False, the attention output is not needed and is zeros.
    """
    observer = getattr(layer, "vericache_observer", None)
    if observer is not None and k is not None:
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        if not observer(layer.layer_id, queries, keys, forward_batch):
            return v.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
    return original(layer, q, k, v, forward_batch, *args, **kwargs)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.layers.radix_attention.RadixAttention.forward",
            kind="around",
            args=(
                "self",
                "q",
                "k",
                "v",
                "forward_batch",
                "save_kv_cache",
                "key_value_num_tokens",
                "**kwargs",
            ),
            reason="Compressors ask for post-RoPE queries and keys; attention backends "
            "see them too, but there is one per device and SGLang owns most of them.",
            remove_when="SGLang lets a worker observe a layer's queries.",
        ),
        forward,
    ),
)
