"""Moves a split request between residencies, and makes finished rows whole again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.compression.budget import complement_indices
from vericache_sglang.engine.row_edit import (
    allocate,
    cached_prefix,
    free,
    leave_tree,
    relist,
)
from vericache_sglang.engine.state import Layout, Parts, RequestState
from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.parked import gathered
from vericache_sglang.memory.splitting import as_bits, join_layer, pick

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vericache_sglang.engine.places import Places
    from vericache_sglang.memory.complement import Complement
    from vericache_sglang.memory.transfers import Transfer


class Mover:
    """Carries out every move but the first split; rows and pool stay in step.

    Args:
        places: Pool, row table, host memory.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._geometry = places.geometry
        self._pool = places.pool
        self._host = places.host
        self._transfers = places.transfers

    def offload(self, state: RequestState, tree_cache: Any) -> Transfer | None:
        """Move the complement from the device to the host; see ``Layout``.

        Returns:
            The copy; None when the host budget does not allow it.
        """
        parts, row = _parts(state), self._places.row(state)
        budget = parts.budget
        if not self._host.fits_complement(budget.dropped, budget.kept):
            return None
        complement = self._host.open(state.rid, budget.dropped, budget.kept)
        body = row[: budget.offered].to(torch.int64).clone()
        kv = state.req.kv
        if parts.layout is Layout.PERMUTED:
            out = body[budget.kept :]
            transfer = self._transfers.save(
                self._permuted(out, parts, complement), complement
            )
            free(tree_cache, out)
            relist(row, kv, budget.offered, body[: budget.kept])
        else:
            owned = kv.cache_protected_len
            transfer = self._transfers.save(
                self._beside(body, parts, complement), complement
            )
            leave_tree(state.req, tree_cache)
            free(tree_cache, body[owned:])
            relist(row, kv, budget.offered, body[:0])
        parts.layout = Layout.KEPT
        return transfer

    def pin(self, state: RequestState, tree_cache: Any) -> bool:
        """Bring the complement back into slots of the pool, for good.

        Returns:
            False when there is no room.

        Raises:
            TransferError: The host copy is damaged.
        """
        parts, row = _parts(state), self._places.row(state)
        fresh = allocate(tree_cache, parts.budget.dropped)
        if fresh is None:
            return False
        complement = self._host.complement(state.rid)
        try:
            for layer in range(self._geometry.layers):
                complement.verify(layer)
                self._places.put(
                    layer, fresh, complement.keys[layer], complement.values[layer]
                )
        except BaseException:
            free(tree_cache, fresh)
            raise
        kept = row[: parts.budget.kept].to(torch.int64)
        relist(row, state.req.kv, parts.budget.kept, torch.cat([kept, fresh]))
        parts.layout = Layout.PERMUTED
        self._host.drop(state.rid)
        return True

    def unsplit(self, state: RequestState, tree_cache: Any) -> None:
        """Give the copies beside a whole prompt back; the choice is remembered."""
        parts, row = _parts(state), self._places.row(state)
        if parts.layout is not Layout.BESIDE:
            return
        body = row[: parts.budget.offered].to(torch.int64).clone()
        copies = row[parts.budget.offered : parts.head].to(torch.int64).clone()
        relist(row, state.req.kv, parts.head, body)
        free(tree_cache, copies)
        parts.layout = Layout.WHOLE
        state.req.skip_radix_cache_insert = not parts.insertable

    def park(self, state: RequestState, tree_cache: Any) -> Transfer | None:
        """Move what a request on the host still holds on the device there too.

        Returns:
            The copy; None when the host budget does not allow it.
        """
        parts, row, kv = _parts(state), self._places.row(state), state.req.kv
        held = state.row_length + len(state.drafts)
        if not self._host.fits(self._host.parked_bytes(held)):
            return None
        image = self._host.park(state.rid, held)
        slots = row[:held].to(torch.int64).clone()
        blocks = gathered(self._pool.k_buffer, self._pool.v_buffer, slots)
        transfer = self._transfers.save(blocks, image)
        # SGLang takes a row without slots for one it has released already, and a parked
        # request may be aborted: the first page stays.
        free(tree_cache, row[self._page : kv.kv_allocated_len].to(torch.int64).clone())
        kv.kv_committed_len -= state.row_length
        kv.kv_allocated_len = self._page
        parts.layout, parts.parked_slots = Layout.PARKED, held
        return transfer

    def resume(self, state: RequestState, tree_cache: Any) -> bool:
        """Bring a parked request's slots back.

        Returns:
            False when there is no room.

        Raises:
            TransferError: The host copy is damaged.
        """
        parts, row, kv = _parts(state), self._places.row(state), state.req.kv
        pages = -(-parts.parked_slots // self._page) * self._page
        fresh = allocate(tree_cache, pages - self._page)
        if fresh is None:
            return False
        image = self._host.parked(state.rid)
        if image is None:
            raise InvariantError(f"{state.rid} is not parked")
        slots = torch.cat([row[: self._page].to(torch.int64), fresh])
        try:
            image.restore(
                self._pool.k_buffer, self._pool.v_buffer, slots[: parts.parked_slots]
            )
        except BaseException:
            free(tree_cache, fresh)
            raise
        committed = kv.kv_committed_len
        relist(row, kv, self._page, slots)
        parts.layout = Layout.KEPT
        kv.kv_committed_len = committed + state.row_length
        self._host.drop_parked(state.rid)
        return True

    def join(self, state: RequestState, tree_cache: Any) -> bool:
        """Make a finished request's row list every token in order, for the tree.

        Returns:
            False when the row stays as it is: no prefix cache, the user asked for no
            insertion, or no room. The scheduler then releases the row uncached.
        """
        parts = state.parts
        if parts is None or parts.layout is Layout.WHOLE:
            return False
        if parts.layout is Layout.BESIDE:
            self.unsplit(state, tree_cache)
            return True
        if parts.layout is Layout.PARKED or tree_cache.disable or not parts.insertable:
            return False
        if not self._in_order(state, parts, tree_cache):
            return False
        parts.layout = Layout.WHOLE
        state.req.skip_radix_cache_insert = False
        return True

    def _in_order(self, state: RequestState, parts: Parts, tree_cache: Any) -> bool:
        budget, row, kv = parts.budget, self._places.row(state), state.req.kv
        own = row[: parts.head].to(torch.int64).clone()
        cached = cached_prefix(state.req, budget.offered, tree_cache)
        if cached is not None:
            free(tree_cache, own)
            relist(row, kv, parts.head, cached)
            kv.cache_protected_len = budget.offered
            return True
        fresh = own[budget.kept :]
        if parts.layout is Layout.KEPT:
            taken = allocate(tree_cache, budget.dropped)
            if taken is None:
                return False
            fresh = taken
        kept_slots = own[: budget.kept]
        whole = torch.cat([kept_slots, fresh])
        for layer, dropped in enumerate(self._dropped_entries(state, fresh)):
            kept = parts.kept[layer].to(whole.device, torch.int64)
            buffers = (self._pool.k_buffer[layer], self._pool.v_buffer[layer])
            for buffer, entries in zip(buffers, dropped, strict=True):
                bits = as_bits(buffer)
                bits[whole] = join_layer(bits[kept_slots], kept, as_bits(entries))
        relist(row, kv, parts.head, whole)
        return True

    def _dropped_entries(
        self, state: RequestState, fresh: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer's dropped keys and values, from where they are.

        Raises:
            TransferError: The host copy is damaged.
        """
        if state.layout is not Layout.KEPT:
            yield from gathered(self._pool.k_buffer, self._pool.v_buffer, fresh)
            return
        complement = self._host.complement(state.rid)
        for layer in range(self._geometry.layers):
            complement.verify(layer)
            yield (
                complement.keys[layer].to(fresh.device),
                complement.values[layer].to(fresh.device),
            )

    def _permuted(
        self, out: torch.Tensor, parts: Parts, complement: Complement
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        blocks = gathered(self._pool.k_buffer, self._pool.v_buffer, out)
        for layer, block in enumerate(blocks):
            complement.kept[layer].copy_(parts.kept[layer])
            yield block

    def _beside(
        self, body: torch.Tensor, parts: Parts, complement: Complement
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        blocks = gathered(self._pool.k_buffer, self._pool.v_buffer, body)
        for layer, (keys, values) in enumerate(blocks):
            complement.kept[layer].copy_(parts.kept[layer])
            kept = parts.kept[layer].to(keys.device, torch.int64)
            dropped = complement_indices(kept, parts.budget.offered)
            yield pick(keys, dropped), pick(values, dropped)

    @property
    def _page(self) -> int:
        return self._geometry.page_size


def _parts(state: RequestState) -> Parts:
    if state.parts is None:
        raise InvariantError(f"{state.rid} is not split")
    return state.parts
