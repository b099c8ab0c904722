"""Hook on ``kv_cache_configurator.py``: a GPU's KV pool leaves room for staging."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def profile_available_bytes(
    original: Hook, configurator: Any, pre_model_load_memory: Any
) -> int:
    """Take the staging region's bytes from what SGLang would give to its own slots."""
    found: int = original(configurator, pre_model_load_memory)
    if str(configurator.device).startswith("cpu"):
        return found  # --max-total-tokens sizes that pool
    from vericache_sglang.engine.staging_size import staging_bytes

    return found - staging_bytes(configurator, found)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.mem_cache.kv_cache_configurator."
                "KVCacheConfigurator._profile_available_bytes"
            ),
            kind="around",
            args=("self", "pre_model_load_memory"),
            reason="The staging region lies behind the pool's slots, which fill the "
            "memory that --mem-fraction-static leaves.",
            remove_when="SGLang asks a pool class for its bytes besides its slots.",
        ),
        profile_available_bytes,
    ),
)
