"""Hooks on ``unified_radix_cache.py``: cached prompts run again, prompts left out."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def swa_reprefill_tail_tokens(original: Hook, cache: Any) -> int:
    """Run at least as many last tokens as a query-aware compressor looks at."""
    stock: int = original(cache)
    return max(stock, getattr(cache, "vericache_reprefill_tail", 0))


def cache_unfinished_req(
    original: Hook, cache: Any, req: Any, chunked: bool = False, **kwargs: Any
) -> None:
    """Keep a shadow check's prompt out of the tree, as a cache that is off does."""
    if not getattr(req, "vericache_shadow", False):
        original(cache, req, chunked=chunked, **kwargs)
        return
    row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    req.prefix_indices = row[: len(req.get_fill_ids())].long()


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
    (
        Patch(
            target=(
                "sglang.srt.mem_cache.unified_radix_cache."
                "UnifiedRadixCache.cache_unfinished_req"
            ),
            kind="around",
            args=("self", "req", "chunked", "**kwargs"),
            reason="skip_radix_cache_insert loses track of a chunked prompt's row.",
            remove_when="SGLang prefills a prompt in chunks outside the tree.",
        ),
        cache_unfinished_req,
    ),
)
