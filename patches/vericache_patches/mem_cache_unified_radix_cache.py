"""Hook on ``unified_radix_cache.py``: how much of a cached prompt is run again."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def swa_reprefill_tail_tokens(original: Hook, cache: Any) -> int:
    """Run at least as many last tokens as a query-aware compressor looks at."""
    stock: int = original(cache)
    return max(stock, getattr(cache, "vericache_reprefill_tail", 0))


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.mem_cache.unified_radix_cache."
                "UnifiedRadixCache.swa_reprefill_tail_tokens"
            ),
            kind="around",
            args=("self",),
            reason="A prompt found whole in the cache runs one token, whose query "
            "alone would choose what SnapKV keeps.",
            remove_when="Our own radix cache class overrides the method.",
        ),
        swa_reprefill_tail_tokens,
    ),
)
