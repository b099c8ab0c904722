"""Placement of every request's draft and residual KV, and the moves that change it."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.attention.packed_rows import DraftCodes
from vericache_sglang.compression.guard import CompressorGuard
from vericache_sglang.errors import (
    CompressionError,
    InvariantError,
    LostKVError,
    TransferError,
)
from vericache_sglang.kv.calibration import measure_link
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.handles import KVHandles
from vericache_sglang.kv.host_memory import open_page_pool
from vericache_sglang.kv.host_store import HostStore
from vericache_sglang.kv.ledger import Account, Ledger
from vericache_sglang.kv.moves import KVMoves
from vericache_sglang.kv.packed_drafts import Codes
from vericache_sglang.kv.prefetch import StagingPrefetcher
from vericache_sglang.kv.prefill_observer import PrefillObserver
from vericache_sglang.kv.staging import StagingBuffer
from vericache_sglang.kv.transfers import open_transfers
from vericache_sglang.observability.counters import Counters
from vericache_sglang.observability.link_log import LinkLog
from vericache_sglang.prefix_cache.assembly import open_segments, shares_draft_kv
from vericache_sglang.prefix_cache.compress import PromptCompressor
from vericache_sglang.runtime.tp_cache import TensorParallelCache
from vericache_sglang.runtime.tp_host import TensorParallelHost
from vericache_sglang.scheduling.plan import (
    Complete,
    Compress,
    Load,
    Move,
    Offload,
    Residency,
    SwapIn,
    SwapOut,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.compression.compressor import Compressor
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.host_image import DraftReader
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.kv.selection import Look
    from vericache_sglang.kv.transfers import Transfer
    from vericache_sglang.runtime.block_table import BlockTablePool
    from vericache_sglang.runtime.tp_sync import TensorParallelSync

logger = logging.getLogger(__name__)


class KVPlacement:
    """Owns and accounts for every resource that VeriCache allocates.

    Args:
        config: Frozen settings.
        tp_sync: Tensor-parallel sync; its measurements observe link bandwidth and
            compression time.
        req_to_token_pool: The pool of block-table rows.
        allocator: SGLang's slot allocator over a pool with a staging buffer.
        compressor: Bound to the model.
        runner: SGLang's ``ModelRunner``, for its arguments (store) and its forward
            stream; None: no store, and a single stream.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        tp_sync: TensorParallelSync,
        req_to_token_pool: BlockTablePool,
        allocator: Any,
        compressor: Compressor,
        runner: Any = None,
    ) -> None:
        pool = allocator.get_kvcache()
        server_args = getattr(runner, "server_args", None)
        page = allocator.page_size
        self._config = config
        self._tp_sync = tp_sync
        estimates = tp_sync.measured
        self.counters = Counters()
        self.geometry = KVGeometry(
            layers=pool.layer_num,
            kv_heads=pool.head_num,
            head_dim=pool.head_dim,
            v_head_dim=pool.v_head_dim,
            element_bytes=pool.store_dtype.itemsize,
            page_size=page,
        )
        self.table: torch.Tensor = req_to_token_pool.req_to_token
        self.verify_rows = req_to_token_pool.shape.verify_rows
        self._every_draft_row = req_to_token_pool.shape.draft_rows
        self._draft_rows = list(self._every_draft_row)
        self.ledger = Ledger()
        selector, codec = compressor.selector, compressor.codec
        if codec is not None:
            codec = codec.without_tail()  # PromptCompressor keeps recent tokens exact
        self.guard = CompressorGuard(compressor.line, self.geometry.kv_heads)
        for part in (selector, codec):
            if part is not None:
                self.guard.wrap(part)
        ranks = getattr(server_args, "tp_size", 1)
        self.page_pool = open_page_pool(config, self.geometry, ranks)
        self.host = HostStore(self.geometry, pool.store_dtype, self.page_pool, codec)
        self._common = TensorParallelHost(self._tp_sync, self.host, self.budget)
        self.link_log = LinkLog(estimates.link)
        transfers = open_transfers(
            pool.k_buffer,
            pool.v_buffer,
            config.link_gbps,
            getattr(runner, "forward_stream", None),
        )
        self.handles = KVHandles(self.geometry, pool, self.table, self.host, transfers)
        self.ranks = TensorParallelCache(tp_sync, self.page_pool)
        self.segments = open_segments(
            config,
            compressor,
            self.handles,
            self.ranks,
            allocator.free,
            server_args,
        )
        self.observer = self.segments.copies.scores = PrefillObserver(
            selector, self.handles
        )
        self.codes = self.segments.copies.codes = (
            None if codec is None else Codes(codec, self.handles)
        )
        # Describes codes to GPU attention; None: on a CPU they are decoded once.
        self.draft_codes: DraftCodes | None = None
        if self.codes is not None and self.handles.device.type != "cpu":
            longest = req_to_token_pool.max_context_len
            self.draft_codes = DraftCodes(
                self.codes, self.handles, longest, config.proposals
            )
        self.compressor = PromptCompressor(
            config,
            selector,
            self.codes,
            self.handles,
            self.segments,
            shareable=shares_draft_kv(compressor, self.segments),
        )
        self._moves = KVMoves(self.handles, self.drafts, self.observer)
        self._read_weight = self._tp_sync.first(self._weigh_codes())
        self.prefetches = StagingPrefetcher(
            StagingBuffer(pool.staging_start, pool.staging_tokens, page),
            transfers,
            self.host,
            self.ledger,
            self.counters,
            self.link_log,
        )
        measure_link(self.handles, self.prefetches.region, estimates.link)
        self._outgoing: list[tuple[str, Transfer]] = []

    @property
    def plain_room(self) -> int:
        """Slots that an autoregressive row uses before the next allocation.

        The tokens of one unreported forward, those of the next one, and one more.
        """
        return 2 * (self._config.proposals + 1) + 1

    @property
    def host_slots(self) -> int:
        """Slots of residual KV that still fit the host budget."""
        room = self.host.free_bytes + self.segments.evictable_bytes
        return room // self.geometry.token_bytes

    def draft_reads(self, budget: Budget) -> int:
        """Return the exact slots that take as long to read as a draft KV."""
        return budget.exact + round(budget.coded * self._read_weight)

    def carried(self, budget: Budget) -> int:
        """Return the size of a residual KV in exact slots; excludes escapes."""
        if self.codes is None:
            return budget.staged
        return budget.dropped + round(budget.coded * self.codes.transfer_fraction)

    def make(self, move: Move, state: RequestState, tree_cache: Any) -> bool:
        """Carry out one move of a plan.

        Returns:
            False if there is no room or a copy to the host failed; nothing changed.

        Raises:
            LostKVError: The required host copy is corrupt on some rank.
            CompressionError: The compressor failed for this request on some rank.
        """
        lost = False
        made = self._common.permits(move, state)
        if made:
            try:
                with self.guard.request(state.rid):
                    made = self._make(move, state, tree_cache)
            except TransferError as error:
                logger.error("VeriCache: %s: %s", state.rid, error)
                made, lost = False, isinstance(error, LostKVError)
            shared = isinstance(move, (Compress, Offload)) and self.segments.kept > 0
            made = self._common.settles(made, lost, shared)
        self.counters.note_move(move, made)
        if made:
            self.note(state)
            self.counters.peak_host_bytes = max(
                self.counters.peak_host_bytes, self.host.used_bytes
            )
        if not self._tp_sync.every(self.guard.sound(state.rid)):
            if self.codes is not None:
                self.distrust(state)  # what a codec has failed to pack
            raise CompressionError("its compressor failed")
        return made

    def staging_key(self, rid: str) -> str:
        """Return a request's staging key; equal for requests that share residual KV."""
        return self.host.group_of(rid)

    def start_prefetch(self, state: RequestState) -> int:
        """Prefetch a request's residual KV; see ``StagingPrefetcher.start``."""
        key = self.staging_key(state.rid)
        return self.prefetches.start(state.rid, key, self.drafts(state))

    def drafts(self, state: RequestState) -> DraftReader | None:
        """Return a reader of a request's packed draft KV; None without a codec."""
        return None if self.codes is None else self.codes.drafts(state)

    def joins(self, state: RequestState | None) -> bool:
        """See ``TensorParallelHost.joins``."""
        return self._common.joins(state)

    def restore(self, state: RequestState, tree_cache: Any) -> None:
        """Restore a finished request for the prefix tree; see ``KVMoves.restore``."""
        if state.inexact:
            return
        if state.parts is not None and state.parts.shared_count:
            if state.residency is Residency.HOST:
                self.compressor.finish(state)
            return
        if not self._moves.restore(state, tree_cache):
            return
        self.counters.restores += 1
        body = self._body(state, state.split.budget)
        self.observer.note(body, state.split.noted)

    def release(
        self, state: RequestState, each_of: Callable[..., None] | None = None
    ) -> None:
        """Free everything a request holds except its row, which SGLang frees.

        Args:
            each_of: Runs the steps, see ``Recovery.each_of``; None: run in sequence.
        """
        rid = state.rid
        steps: tuple[Callable[[], object], ...] = (
            *(
                partial(holder.forget, rid)
                for holder in (self.observer, self._moves, self._common, self.guard)
            ),
            partial(self.prefetches.end, rid),
            partial(self.host.drop, rid),
            partial(self.segments.release, rid),
            partial(self.ledger.give, Account.KEPT_SLOTS, rid),
            partial(self._free_draft_row, state),
        )
        if each_of is not None:
            each_of(*steps)
            return
        for step in steps:
            step()

    def distrust(self, state: RequestState) -> None:
        """Stop sharing the KV of a request that lost its KV."""
        if state.parts is not None:
            self.segments.distrust(state.parts.segments)

    def forget_all(self) -> None:
        """Reset all accounting; no request has KV.

        SGLang has reset its slots and flushed the prefix cache.
        """
        self.prefetches.forget_all()
        self.segments.forget_users()
        self.host.clear()
        self.ledger.clear()
        self._outgoing.clear()
        self._common = TensorParallelHost(self._tp_sync, self.host, self.budget)
        self._draft_rows = list(self._every_draft_row)

    def poll_outgoing(self) -> None:
        """Observe copies to the host that have completed."""
        travelling = []
        for rid, transfer in self._outgoing:
            try:
                done = transfer.done()
            except TransferError as error:
                # The residual is not sealed, so its prefetch will fail.
                logger.error("VeriCache: a copy of %s to the host: %s", rid, error)
                continue
            if not done:
                travelling.append((rid, transfer))
                continue
            self.link_log.note(rid, "out", transfer)
            self.counters.offloaded_bytes += transfer.nbytes
            self.host.settle(rid)
        self._outgoing = travelling

    def close(self) -> None:
        """Stop copy threads and unlock host memory when the process ends."""
        self.handles.transfers.close()
        self.page_pool.close()

    def check(self, living: Collection[str]) -> None:
        """Check the ledger against staging buffer, host store and segments.

        Raises:
            InvariantError: They disagree and ``segments.strict`` is set.
        """
        with self.segments.cache_only():
            self.ledger.check(
                {*living, *self.prefetches.keys}, self.prefetches.region.used
            )
            self.host.check(living, self.segments.copies.held_bytes)
            self.segments.check()

    def report(self) -> dict[str, int | float | str]:
        """Return counters and current holdings."""
        held = {account.value: self.ledger.total(account) for account in Account}
        return {
            **self.counters.report(),
            **self.segments.report(),
            **self.guard.report(),
            **held,
            "staging_bytes": self.prefetches.region.used * self.geometry.token_bytes,
            "host_bytes": self.host.held_bytes,
            "host_used_bytes": self.host.used_bytes,
            "host_pinned_bytes": self.host.used_bytes - self.segments.evictable_bytes,
            "host_budget_bytes": self.host.budget_bytes,
            "query_tails": len(self.observer),
            "staging_tokens": self.prefetches.region.slots,
        }

    def _make(self, move: Move, state: RequestState, tree_cache: Any) -> bool:
        if isinstance(move, Complete):
            self.compressor.complete(state)
            return True
        if isinstance(move, Compress):
            return self._compress(state, move.residency, tree_cache)
        if isinstance(move, Offload):
            return self._to_host(state, state.split.budget, tree_cache)
        if isinstance(move, Load):
            made = self._moves.load(state, tree_cache)
            if made:
                self.prefetches.end(state.rid)
                self.segments.stop_referring(state.rid)
                self._common.forget(state.rid)
                self._take_draft_row(state)
            return made
        if isinstance(move, SwapOut):
            transfer = self._moves.swap_out(state, tree_cache)
            if transfer is None:
                return False
            self.prefetches.end(state.rid)
            self.segments.stop_listing(state.rid)
            self._outgoing.append((state.rid, transfer))
            return True
        if isinstance(move, SwapIn):
            return self._moves.swap_in(state, tree_cache)
        if state.inexact:
            return False
        self._moves.fall_back(state, tree_cache)
        self.segments.stop_listing(state.rid)
        self.observer.note(self._body(state, state.split.budget), state.split.noted)
        self._free_draft_row(state)
        state.drop_drafts()
        return True

    def budget(self, state: RequestState) -> Budget | None:
        """Return the budget of an uncompressed prompt; None if it is too short."""
        shared = self.compressor.shared_budget(state)
        if shared is not None:
            return shared
        plain = self.compressor.budget(state.prompt)
        if plain is None:
            return None
        with self.guard.request(state.rid):
            share = self.observer.share(self._body(state, plain))
        # Ranks have equally many heads, so the mean over ranks is that over heads.
        return self.compressor.budget(state.prompt, self._tp_sync.mean_of_all(share))

    def _body(self, state: RequestState, budget: Budget) -> torch.Tensor:
        """Return the slots of the prompt's full pages; the row is uncompressed."""
        row = self.table[state.req.kv.req_pool_idx]
        return row[: budget.offered].to(torch.int64).clone()

    def _compress(self, state: RequestState, to: Residency, tree_cache: Any) -> bool:
        known = state.parts
        if known is None and not self.observer.ready(state.rid):
            return False
        budget = known.budget if known else self.budget(state)
        if budget is None:
            raise InvariantError(f"{state.rid} is too short to be compressed")
        body = self._body(state, budget)
        look = partial(self.observer.seen, state.rid, slots=body)
        began = time.perf_counter()
        if to is Residency.HOST:
            made = self._to_host(state, budget, tree_cache, look)
        else:
            made = self.compressor.on_device(state, tree_cache, budget, look)
        if made:
            if known is None:
                state.split.noted = self.observer.noted(body)
            self.observer.forget(state.rid)
            elapsed = time.perf_counter() - began
            self._tp_sync.measured.split_s.observe(elapsed / state.prompt)
            if to is Residency.DEVICE:
                self._take_draft_row(state)
        return made

    def _to_host(
        self,
        state: RequestState,
        budget: Budget,
        tree_cache: Any,
        look: Look | None = None,
    ) -> bool:
        """Compress to the host, or offload; see ``PromptCompressor.to_host``."""
        made, transfer = self.compressor.to_host(state, tree_cache, budget, look)
        if transfer is not None:
            self._outgoing.append((state.rid, transfer))
        if made:
            self._free_draft_row(state)
            if state.split.shared_slots is None:
                self._common.share(state.rid)
        return made

    def note(self, state: RequestState) -> None:
        """Account for a request whose KV has moved, and tell SGLang of its slots."""
        self._book(state)
        self._tell_scheduler(state)

    def _book(self, state: RequestState) -> None:
        self.ledger.give(Account.KEPT_SLOTS, state.rid)
        if state.parts is None or state.parts.shared_slots is not None:
            return
        if state.residency in (Residency.HOST, Residency.DEVICE):
            self.ledger.take(Account.KEPT_SLOTS, state.rid, state.parts.budget.slots)

    def _tell_scheduler(self, state: RequestState) -> None:
        """Set the attributes that our hooks read from SGLang's request.

        ``vericache_room``: slots the request uses before the next allocation
        (patches: speculative_eagle_utils). ``vericache_swapped_slots``: slots it needs
        to be swapped in (patches: managers_schedule_policy).
        """
        parts, req = state.parts, state.req
        if parts is None:
            return
        req.vericache_room = self.plain_room
        req.vericache_swapped_slots = 0
        if parts.residency is Residency.SWAPPED:
            req.vericache_room = 0
            req.vericache_swapped_slots = state.swappable_slots
        elif parts.residency is not None:
            # With overlap one cycle may be unreported while the next one is written.
            req.vericache_room = 2 * (self._config.most_drafts + 1)

    def _weigh_codes(self) -> float:
        """Measure the time to read a coded token, relative to an exact slot."""
        if self.codes is None or self.draft_codes is None:
            return 1.0
        slot_s = self._tp_sync.measured.iteration.coefficients
        exact_s = (slot_s.per_read_s + slot_s.per_product_s) / self.geometry.layers
        if self.draft_codes.in_kernel:
            return self.draft_codes.seconds_per_token() / exact_s
        return 1.0 + self.codes.seconds_per_token() / exact_s

    def _take_draft_row(self, state: RequestState) -> None:
        """List the draft KV in a draft block-table row; the own row lists more."""
        parts = state.parts
        if parts is None:
            return
        parts.draft_row, parts.listed = self._draft_rows.pop(), 0
        budget = parts.budget
        own = self.table[state.req.kv.req_pool_idx]
        start = budget.offered if parts.residency is Residency.DEVICE else 0
        slots = own[start : start + budget.slots]
        if parts.shared_slots is not None:
            slots = parts.shared_slots.to(own.dtype)
        self.table[parts.draft_row, : budget.slots] = slots

    def _free_draft_row(self, state: RequestState) -> None:
        if state.parts is not None and state.parts.draft_row >= 0:
            self._draft_rows.append(state.parts.draft_row)
            state.parts.draft_row = -1
