"""Moves KV of compressed requests between placements, and restores finished rows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.errors import InvariantError, LostKVError, TransferError
from vericache_sglang.kv.host_image import CopyTarget
from vericache_sglang.kv.row_edit import (
    allocate,
    cached_prefix,
    free,
    relist,
)
from vericache_sglang.kv.swapped import gathered
from vericache_sglang.scheduling.plan import Residency

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.host_image import DraftReader
    from vericache_sglang.kv.prefill_observer import PrefillObserver
    from vericache_sglang.kv.request import Parts, RequestState
    from vericache_sglang.kv.transfers import Transfer

logger = logging.getLogger(__name__)


class KVMoves:
    """Carries out every move except compression; keeps block table and pool in step.

    Args:
        handles: Pool, block table, host memory.
        drafts: Returns a reader of a request's packed draft KV.
        observer: Holds the scores of tokens by slot.
    """

    def __init__(
        self,
        handles: KVHandles,
        drafts: Callable[[RequestState], DraftReader | None],
        observer: PrefillObserver,
    ) -> None:
        self._drafts = drafts
        self._observer = observer
        # By id of a swapped-out request, the scores in its decode slots.
        self._noted: dict[str, list[torch.Tensor]] = {}
        self._handles = handles
        self._geometry = handles.geometry
        self._pool = handles.pool
        self._host = handles.host
        self._transfers = handles.transfers

    def load(self, state: RequestState, tree_cache: Any) -> bool:
        """Load the full KV into slots of the pool, beside the draft KV.

        Returns:
            False where there is no room.

        Raises:
            LostKVError: The host copy is damaged.
        """
        parts, row, kv = state.split, self._handles.row(state), state.req.kv
        budget = parts.budget
        whole = allocate(tree_cache, budget.offered)
        if whole is None:
            return False
        draft = row[: budget.slots].to(torch.int64).clone()
        try:
            self._write_whole(state, draft[budget.code_slots :], whole)
        except TransferError as error:
            free(tree_cache, whole)
            raise LostKVError(str(error)) from error
        own = draft if parts.shared_slots is None else draft[:0]
        relist(row, kv, budget.slots, torch.cat([whole, own]))
        kv.cache_protected_len = 0
        parts.residency = Residency.DEVICE
        self._host.drop(state.rid)
        return True

    def fall_back(self, state: RequestState, tree_cache: Any) -> None:
        """Free the draft KV beside a prompt's full KV; the selection is remembered."""
        parts, row = state.split, self._handles.row(state)
        body = row[: parts.budget.offered].to(torch.int64).clone()
        draft = row[parts.budget.offered : parts.head].to(torch.int64).clone()
        relist(row, state.req.kv, parts.head, body)
        free(tree_cache, draft)
        parts.residency, parts.shared_slots = None, None
        state.req.skip_radix_cache_insert = not parts.insertable

    def swap_out(self, state: RequestState, tree_cache: Any) -> Transfer | None:
        """Move the draft KV and decode slots of an offloaded request to the host.

        Returns:
            The copy; None where the host budget is exhausted, or no page is free for a
            row that owns none.

        Raises:
            TransferError: The copy could not be made; nothing changed.
        """
        parts, row, kv = state.split, self._handles.row(state), state.req.kv
        held = state.swappable_slots
        own = row[parts.shared_count : kv.kv_allocated_len].to(torch.int64).clone()
        taken = own[:0]
        if not len(own):  # shared draft KV, and nothing decoded yet
            page = allocate(tree_cache, self._page)
            if page is None:
                return None
            own = taken = page
        # After the allocation, whose evictions may take host memory.
        if not self._host.fits(self._host.swapped_bytes(held)):
            free(tree_cache, taken)
            return None
        image = self._host.swap_out(state.rid, held)
        slots = row[:held].to(torch.int64).clone()
        self._noted[state.rid] = self._observer.noted(slots[parts.head :])
        blocks = gathered(self._pool.k_buffer, self._pool.v_buffer, slots)
        try:
            transfer = self._transfers.save(blocks, image)
        except TransferError:
            self._host.drop_swapped(state.rid)
            self._noted.pop(state.rid)
            free(tree_cache, taken)
            raise
        # SGLang takes a row without slots for a released one, and a swapped-out request
        # may be aborted: the first page it owns stays.
        free(tree_cache, own[self._page :])
        row[: self._page] = own[: self._page].to(row.dtype)
        kv.kv_committed_len -= state.row_length
        kv.kv_allocated_len, kv.cache_protected_len = self._page, 0
        parts.residency, parts.shared_slots = Residency.SWAPPED, None
        return transfer

    def swap_in(self, state: RequestState, tree_cache: Any) -> bool:
        """Load the draft KV and the decode slots of a swapped-out request.

        Returns:
            False where there is no room.

        Raises:
            LostKVError: The host copy is damaged.
        """
        parts, row, kv = state.split, self._handles.row(state), state.req.kv
        held = state.swappable_slots
        pages = -(-held // self._page) * self._page
        fresh = allocate(tree_cache, pages - self._page)
        if fresh is None:
            return False
        image = self._host.swapped(state.rid)
        if image is None:
            raise InvariantError(f"{state.rid} is not swapped out")
        slots = torch.cat([row[: self._page].to(torch.int64), fresh])
        try:
            self._transfers.place(image, CopyTarget(slots[:held]))
        except TransferError as error:
            free(tree_cache, fresh)
            raise LostKVError(str(error)) from error
        committed = kv.kv_committed_len
        relist(row, kv, self._page, slots)
        parts.residency = Residency.HOST
        kv.kv_committed_len = committed + state.row_length
        self._host.drop_swapped(state.rid)
        behind = slots[parts.head : held]
        self._observer.note(behind, self._noted.pop(state.rid, []))
        return True

    def forget(self, rid: str) -> None:
        """Drop the saved scores of a swapped-out request; no effect without any.

        Its image belongs to the host store.
        """
        self._noted.pop(rid, None)

    def restore(self, state: RequestState, tree_cache: Any) -> bool:
        """Restore a finished request's row to prompt order, for the prefix tree.

        Returns:
            False where the row stays as it is: no prefix cache, shared draft KV, a
            request that opted out of insertion, no room, or a damaged host copy. The
            scheduler then releases the row uncached.
        """
        parts = state.parts
        if parts is None or parts.residency is None or parts.shared_count:
            return False
        if parts.residency is Residency.DEVICE:
            self.fall_back(state, tree_cache)
            return True
        swapped = parts.residency is Residency.SWAPPED
        if swapped or tree_cache.disable or not parts.insertable:
            return False
        if not self._in_order(state, parts, tree_cache):
            return False
        parts.residency = None
        state.req.skip_radix_cache_insert = False
        return True

    def _in_order(self, state: RequestState, parts: Parts, tree_cache: Any) -> bool:
        budget, row, kv = parts.budget, self._handles.row(state), state.req.kv
        own = row[: parts.head].to(torch.int64).clone()
        cached = cached_prefix(state.req, budget.offered, tree_cache)
        if cached is not None:
            free(tree_cache, own)
            relist(row, kv, parts.head, cached)
            kv.cache_protected_len = budget.offered
            return True
        fresh = allocate(tree_cache, budget.offered - budget.slots)
        if fresh is None:
            return False
        # Segments are restored one after another: the draft KV of later ones must be
        # in none of the slots that earlier ones fill.
        whole = torch.cat([fresh, own])
        try:
            self._write_whole(state, own[budget.code_slots :], whole)
        except TransferError as error:
            logger.error("VeriCache: %s is not cached: %s", state.rid, error)
            free(tree_cache, fresh)
            return False
        relist(row, kv, parts.head, whole)
        return True

    def _write_whole(
        self, state: RequestState, exact: torch.Tensor, whole: torch.Tensor
    ) -> None:
        """Restore a prompt's entries in order from draft KV and residual KV.

        Args:
            state: Its residual KV is on the host.
            exact: [n] int64, slots of the exact entries.
            whole: [B] int64, target slots; may overlap the source slots.

        Raises:
            TransferError: The host copy is damaged.
        """
        residual = self._host.residual(state.rid)
        target = CopyTarget(whole, state.split.kept, exact)
        self._transfers.place(residual, target, self._drafts(state))

    @property
    def _page(self) -> int:
        return self._geometry.page_size
