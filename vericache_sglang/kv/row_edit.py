"""Edits of a request's block-table row, and slots for them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey


def allocate(tree_cache: Any, slots: int) -> torch.Tensor | None:
    """Take ``slots`` slots, a multiple of the page size, evicting unlocked prefixes.

    Returns:
        [slots] int64; None, and nothing was evicted, where evicting all of them would
        not make room.
    """
    if room(tree_cache) < slots:
        return None
    evict_from_tree_cache(tree_cache, slots)
    taken: torch.Tensor | None = tree_cache.token_to_kv_pool_allocator.alloc(slots)
    return taken


def room(tree_cache: Any) -> int:
    """Return the slots that are free or evictable."""
    allocator = tree_cache.token_to_kv_pool_allocator
    return int(allocator.available_size() + tree_cache.evictable_size())


def free(tree_cache: Any, slots: torch.Tensor) -> None:
    """Free slots, in whole pages."""
    if len(slots):
        tree_cache.token_to_kv_pool_allocator.free(slots)


def own_slots_cover(req: Any, tree_cache: Any, slots: int, own: int) -> bool:
    """Return whether a request's own prompt makes room for ``slots`` slots.

    Args:
        req: SGLang's request.
        tree_cache: SGLang's prefix cache.
        slots: Slots needed.
        own: Slots of the prompt that the request owns; its lock on the tree holds more.
    """
    if room(tree_cache) + own >= slots:
        return True
    if not req.kv.cache_protected_len:
        return False
    node = req.last_node
    tree_cache.unpin(req)
    enough = room(tree_cache) + own >= slots
    req.lock_receipt = tree_cache.inc_lock_ref(node).to_dec_params()
    return enough


def leave_tree(req: Any, tree_cache: Any) -> None:
    """Drop a request's lock on its prefix; the row no longer lists the tree's slots."""
    if req.kv.cache_protected_len:
        tree_cache.unpin(req)
        req.last_node = None
        req.kv.cache_protected_len = 0


def relist(row: torch.Tensor, kv: Any, old: int, head: torch.Tensor) -> None:
    """Replace the first ``old`` slots of a row by ``head`` and shift the others.

    Lengths change by the difference, so they stay right for results that SGLang has
    not processed yet.

    Args:
        row: The request's row, int32.
        kv: ``Req.kv``.
        old: Slots replaced.
        head: [k] slots, any integer dtype.
    """
    rest = row[old : kv.kv_allocated_len].clone()
    row[: len(head)] = head.to(row.dtype)
    row[len(head) : len(head) + len(rest)] = rest
    kv.kv_committed_len += len(head) - old
    kv.kv_allocated_len += len(head) - old


def cached_prefix(req: Any, length: int, tree_cache: Any) -> torch.Tensor | None:
    """Return the tree's slots of the first ``length`` tokens; None if it lacks any."""
    key = RadixKey(
        (req.origin_input_ids + req.output_ids)[:length],
        req.extra_key,
        cache_salt=req.cache_salt,
    )
    match = tree_cache.match_prefix(MatchPrefixParams(key=key))
    slots: torch.Tensor = match.device_indices
    return slots.to(torch.int64) if len(slots) >= length else None
