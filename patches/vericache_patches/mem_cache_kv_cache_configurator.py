"""Hook on ``kv_cache_configurator.py``: a staging buffer in the in-tree KV pool."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def build_mha_kv_pool(
    original: Hook,
    configurator: Any,
    *,
    mha_pool_class: type,
    max_total_num_tokens: int,
    **arguments: Any,
) -> Any:
    """Build our pool class in place of the stock one where VeriCache is on.

    Raises:
        ValueError: SGLang chose another pool class, which has no staging buffer.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from vericache_sglang.kv.sglang_pools import staged_pool_class
    from vericache_sglang.runtime.staging_size import staging_slots, with_staging

    slots = staging_slots(with_staging(max_total_num_tokens))
    if slots:
        if mha_pool_class is not MHATokenToKVPool:
            raise ValueError(f"no staging buffer in a {mha_pool_class.__name__}")
        mha_pool_class = staged_pool_class(slots)
    return original(
        configurator,
        mha_pool_class=mha_pool_class,
        max_total_num_tokens=max_total_num_tokens,
        **arguments,
    )


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.mem_cache.kv_cache_configurator."
                "KVCacheConfigurator._build_mha_kv_pool"
            ),
            kind="around",
            args=("self", "max_total_num_tokens", "mha_pool_class", "quant_method"),
            reason="Only out-of-tree platforms may choose the KV pool class, and CUDA "
            "is in the tree.",
            remove_when="SGLang takes the pool class from a registry on CUDA too.",
        ),
        build_mha_kv_pool,
    ),
)
