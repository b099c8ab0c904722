"""Where the two parts of every request are, and the moves that change it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vericache_sglang.compression.base import ModelSpec
from vericache_sglang.compression.catalog import create_selector
from vericache_sglang.engine.calibration import measure_link
from vericache_sglang.engine.counters import Counters
from vericache_sglang.engine.link_log import LinkLog
from vericache_sglang.engine.mover import Mover
from vericache_sglang.engine.places import Places
from vericache_sglang.engine.query_tails import QueryTails
from vericache_sglang.engine.reloads import Reloads
from vericache_sglang.engine.splitter import Splitter
from vericache_sglang.engine.state import Layout, RequestState
from vericache_sglang.memory.geometry import KVGeometry
from vericache_sglang.memory.host_store import HostStore
from vericache_sglang.memory.ledger import Account, Ledger
from vericache_sglang.memory.staging import StagingRegion
from vericache_sglang.memory.transfers import GIB, open_transfers
from vericache_sglang.scheduling.plan import (
    Move,
    Offload,
    Park,
    Pin,
    Residency,
    Resume,
    Split,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.memory.transfers import Transfer
    from vericache_sglang.scheduling.estimates import Estimates

PLAIN_ROOM = 3
"""Slots a plain row uses before the next allocation: a late token and two more."""


class Residence:
    """Owns every resource VeriCache takes, and books it.

    Args:
        config: Frozen settings.
        estimates: Learns the speed of link and splits.
        req_to_token_pool: SGLang's row pool; its table is replaced by a wider one.
        allocator: SGLang's slot allocator over a pool with a staging region.
        query_heads: Query heads on this rank.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        estimates: Estimates,
        req_to_token_pool: Any,
        allocator: Any,
        query_heads: int,
    ) -> None:
        pool = allocator.get_kvcache()
        page = allocator.page_size
        self._config = config
        self._estimates = estimates
        self.counters = Counters()
        self.geometry = KVGeometry(
            layers=pool.layer_num,
            kv_heads=pool.head_num,
            head_dim=pool.head_dim,
            v_head_dim=pool.v_head_dim,
            element_bytes=pool.store_dtype.itemsize,
            page_size=page,
        )
        rows = req_to_token_pool.req_to_token.shape[0]
        self.table = _widen(req_to_token_pool, config, page)
        self.verify_rows = range(rows, rows + config.max_verifies)
        self._draft_rows = list(range(self.verify_rows.stop, self.table.shape[0]))
        self.ledger = Ledger()
        self.host = HostStore(
            self.geometry, pool.store_dtype, int(config.host_gb * GIB)
        )
        self._selector = create_selector(config.compressor, config.seed)
        self._selector.bind(
            ModelSpec(
                layers=pool.layer_num,
                query_heads=query_heads,
                kv_heads=pool.head_num,
                head_dim=pool.head_dim,
            )
        )
        self.link_log = LinkLog(estimates.link)
        self.query_tails = QueryTails(self._selector.needs.q_tail)
        transfers = open_transfers(pool.k_buffer, pool.v_buffer, config.link_gbps)
        places = Places(self.geometry, pool, self.table, self.host, transfers)
        self.splitter = Splitter(config, self._selector, places)
        self._mover = Mover(places)
        self.reloads = Reloads(
            StagingRegion(pool.staging_start, pool.staging_tokens, page),
            transfers,
            self.host,
            self.ledger,
            self.counters,
            self.link_log,
        )
        measure_link(places, self.reloads.region, estimates.link)
        self._outgoing: list[tuple[str, Transfer]] = []

    @property
    def host_slots(self) -> int:
        """Slots of a complement that still fit the host budget."""
        return self.host.free_bytes // self.geometry.token_bytes

    def make(self, move: Move, state: RequestState, tree_cache: Any) -> bool:
        """Carry out one move of a plan.

        Returns:
            False when there is no room for it after all; nothing changed.

        Raises:
            TransferError: The host copy it needs is damaged.
        """
        made = self._make(move, state, tree_cache)
        self.counters.note_move(move, made)
        if made:
            self._book(state)
            self._tell_scheduler(state)
            self.counters.peak_host_bytes = max(
                self.counters.peak_host_bytes, self.host.used_bytes
            )
        return made

    def staging_key(self, rid: str) -> str:
        """Return what a request's staging is known by; equal for those who share."""
        return self.host.group_of(rid)

    def join(self, state: RequestState, tree_cache: Any) -> None:
        """Make a finished row whole for the prefix tree; see ``Mover.join``."""
        self.counters.joins += self._mover.join(state, tree_cache)

    def release(self, state: RequestState) -> None:
        """Give back all a request holds; its row itself is SGLang's to free."""
        self.query_tails.forget(state.rid)
        self.reloads.end(state.rid)
        self.host.drop(state.rid)
        self._selector.close(state.rid)
        self.ledger.give(Account.KEPT_SLOTS, state.rid)
        self._give_shadow(state)

    def poll_outgoing(self) -> None:
        """Learn from copies to the host that have ended."""
        travelling = []
        for rid, transfer in self._outgoing:
            if transfer.done():
                self.link_log.note(rid, "out", transfer)
            else:
                travelling.append((rid, transfer))
        self._outgoing = travelling

    def check(self, living: Collection[str]) -> None:
        """Balance the ledger against the region and recount the host store.

        Raises:
            InvariantError: Something does not balance.
        """
        self.ledger.check({*living, *self.reloads.keys}, self.reloads.region.used)
        self.host.check(living)

    def report(self) -> dict[str, int | float]:
        """Return counters and current holdings."""
        held = {account.value: self.ledger.total(account) for account in Account}
        return {
            **self.counters.report(),
            **held,
            "staging_bytes": self.reloads.region.used * self.geometry.token_bytes,
            "host_bytes": self.host.used_bytes,
            "host_budget_bytes": self.host.budget_bytes,
            "query_tails": len(self.query_tails),
            "staging_tokens": self.reloads.region.slots,
        }

    def _make(self, move: Move, state: RequestState, tree_cache: Any) -> bool:
        if isinstance(move, Split):
            return self._split(state, move.residency, tree_cache)
        if isinstance(move, Offload):
            return self._offload(state, tree_cache)
        if isinstance(move, Pin):
            made = self._mover.pin(state, tree_cache)
            if made:
                self.reloads.end(state.rid)
                self._take_shadow(state)
            return made
        if isinstance(move, Park):
            transfer = self._mover.park(state, tree_cache)
            if transfer is None:
                return False
            self.reloads.end(state.rid)
            self._outgoing.append((state.rid, transfer))
            return True
        if isinstance(move, Resume):
            return self._mover.resume(state, tree_cache)
        self._mover.unsplit(state, tree_cache)
        self._give_shadow(state)
        state.drop_drafts()
        return True

    def _split(self, state: RequestState, to: Residency, tree_cache: Any) -> bool:
        if state.layout is Layout.PERMUTED:  # both parts are there already
            if to is Residency.HOST:
                return self._offload(state, tree_cache)
            made = True
        else:
            made = self._first_split(state, to, tree_cache)
        if made and to is Residency.DEVICE:
            self._take_shadow(state)
        return made

    def _first_split(self, state: RequestState, to: Residency, tree_cache: Any) -> bool:
        queries = self.query_tails.of(state.rid)
        if not self.splitter.ready(state, queries):
            return False
        began = time.perf_counter()
        if to is Residency.HOST:
            transfer = self.splitter.to_host(state, tree_cache, queries)
            made = transfer is not None
            if transfer is not None:
                self._note_offload(state, transfer)
        else:
            made = self.splitter.on_device(state, tree_cache, queries)
        if made:
            self.query_tails.forget(state.rid)
            elapsed = time.perf_counter() - began
            self._estimates.split_s.observe(elapsed / state.prompt)
        return made

    def _offload(self, state: RequestState, tree_cache: Any) -> bool:
        transfer = self._mover.offload(state, tree_cache)
        if transfer is None:
            return False
        self._give_shadow(state)
        self._note_offload(state, transfer)
        return True

    def _note_offload(self, state: RequestState, transfer: Transfer) -> None:
        self._outgoing.append((state.rid, transfer))
        self.counters.offloaded_bytes += transfer.nbytes
        # A CUDA copy is sealed by its thread, too late to compare it now.
        if self.host.complement(state.rid).sealed:
            self.host.share(state.rid)

    def _book(self, state: RequestState) -> None:
        self.ledger.give(Account.KEPT_SLOTS, state.rid)
        if state.parts is not None and state.layout in (Layout.KEPT, Layout.BESIDE):
            self.ledger.take(Account.KEPT_SLOTS, state.rid, state.parts.budget.kept)

    def _tell_scheduler(self, state: RequestState) -> None:
        """Leave on SGLang's request what our hooks read of a split one.

        ``vericache_room``: slots it uses before the next allocation
        (patches: speculative_eagle_utils). ``vericache_parked_slots``: what it will
        want back (patches: managers_schedule_policy).
        """
        parts, req = state.parts, state.req
        if parts is None:
            return
        req.vericache_room = PLAIN_ROOM
        req.vericache_parked_slots = 0
        if parts.layout is Layout.PARKED:
            req.vericache_room, req.vericache_parked_slots = 0, parts.parked_slots
        elif parts.layout is Layout.KEPT or parts.shadow >= 0:
            # One round may be committed late (overlap), the next one is written.
            req.vericache_room = 2 * (self._config.draft_length + 1)

    def _take_shadow(self, state: RequestState) -> None:
        """List the draft part in a row of its own; the own row lists more."""
        parts = state.parts
        if parts is None:
            return
        parts.shadow, parts.listed = self._draft_rows.pop(), 0
        budget = parts.budget
        own = self.table[state.req.kv.req_pool_idx]
        start = budget.offered if parts.layout is Layout.BESIDE else 0
        self.table[parts.shadow, : budget.kept] = own[start : start + budget.kept]

    def _give_shadow(self, state: RequestState) -> None:
        if state.parts is not None and state.parts.shadow >= 0:
            self._draft_rows.append(state.parts.shadow)
            state.parts.shadow = -1


def _widen(pool: Any, config: VeriCacheConfig, page: int) -> torch.Tensor:
    """Give SGLang's row table shadow rows, and its rows room for copies and drafts."""
    old: torch.Tensor = pool.req_to_token
    rows, width = old.shape
    # Twice the round (SGLang reserves two, allocation_sizing.py) and a page to round;
    # kept entries may be listed beside a whole prompt.
    extra = 2 * (config.draft_length + 1) + int(config.keep * width) + 2 * page
    wide = old.new_zeros(2 * rows + config.max_verifies, width + extra)
    wide[:rows, :width] = old
    pool.req_to_token = wide
    return wide
