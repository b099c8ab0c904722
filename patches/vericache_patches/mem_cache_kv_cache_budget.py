"""Hook on ``kv_cache_configurator.py``: memory that the KV pool must not use."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def profile_available_bytes(
    original: Hook, configurator: Any, pre_model_load_memory: Any
) -> int:
    """Subtract the staging buffer and later allocations from SGLang's own slots.

    Later allocations are block tables, logits buffer, page tables and scratch: the
    entries of the memory ledger (``planning/memory.py``) that are neither KV nor part
    of SGLang's reserve.
    """
    found: int = original(configurator, pre_model_load_memory)
    if str(configurator.device).startswith("cpu"):
        return found  # --max-total-tokens sizes that pool
    from vericache_sglang.runtime.device_memory import reserved_bytes

    return found - reserved_bytes(found)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.mem_cache.kv_cache_configurator."
                "KVCacheConfigurator._profile_available_bytes"
            ),
            kind="around",
            args=("self", "pre_model_load_memory"),
            reason="The pool's slots fill what --mem-fraction-static leaves; the "
            "staging buffer lies behind them, and block tables, logits and scratch are "
            "allocated after them.",
            remove_when="SGLang sizes the pool after graphs are captured, and asks a "
            "pool class for its bytes besides its slots.",
        ),
        profile_available_bytes,
    ),
)
