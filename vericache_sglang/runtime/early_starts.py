"""Requests that draft on stored draft KV while their residual KV is still being read.

A request starts early if its row lists the draft KV of its prompt's first segments and
slots for the rest, without a prefill: through SGLang's PREBUILT batch, as on a decode
server. Until its residual KV is complete it drafts; its first verification then
computes the end of the prompt again over the full KV. Nothing is emitted before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.observability.req_time_stats import set_time_batch

from vericache_sglang.kv.row_edit import allocate, room
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.early_segments import EarlySegments
from vericache_sglang.runtime.algorithm import relayed
from vericache_sglang.runtime.eligibility import travels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang.srt.managers.schedule_batch import Req

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.prefix_cache.store.fetches import Rest
    from vericache_sglang.prefix_cache.store.found import Found
    from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
    from vericache_sglang.runtime.placement import KVPlacement

MOST_SUFFIX = 2048
"""Most tokens of a prompt behind its stored segments: they are computed twice."""

SUFFIX_SHARE = 4
"""A prompt must be at least so many times as long as its end without stored KV."""


def longest_suffix(tokens: int) -> int:
    """Return the most tokens behind the KV that is there of a text of ``tokens``."""
    return min(MOST_SUFFIX, tokens // SUFFIX_SHARE)


class EarlyStarts:
    """Starts waiting requests, and takes in their residual KV as it arrives.

    Args:
        config: Frozen settings.
        placement: Holds the requests' KV.
        draft_tokens: Tokens of all requests.
        drafts: Returns whether a request would draft, given the length of its prompt.
        arrive: Creates the state of a request, given the tokens before its last one.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        placement: KVPlacement,
        draft_tokens: DraftTokenBuffer,
        drafts: Callable[[Req, int], bool],
        arrive: Callable[[Req, int], RequestState],
    ) -> None:
        self._config = config
        self._placement = placement
        self._draft_tokens = draft_tokens
        self._drafts = drafts
        self._arrive = arrive
        self._segments = placement.segments
        self._early = EarlySegments(placement.segments, placement.handles)
        self._rests: dict[str, Rest] = {}

    def expect(self, req: Req) -> None:
        """Have the draft KV of a new request read first, if it could start early.

        One that was retracted is read whole: it might be retracted again and again
        before its residual KV has come. Called right before SGLang starts its read
        (patches: managers_scheduler_queue).
        """
        stored = self._segments.stored
        if stored is not None:
            early = travels(req) and not req.retraction_count and self._segments.kept
            early = early and self._drafts(req, len(req.origin_input_ids))
            stored.draft_first = req.rid if early else ""

    def take(self, scheduler: Any) -> None:
        """Start the waiting requests whose draft KV has been read.

        Args:
            scheduler: SGLang's ``Scheduler``, before it chooses its next batch.
        """
        stored = self._segments.stored
        for rid in stored.drafted() if stored is not None else ():
            req = self._find(scheduler, rid)
            if req is None or stored is None:
                continue
            names, found = stored.drafts_of(rid)
            count = self._count(req, len(found))
            names, found = names[:count], found[:count]
            if count and self._comes_whole(names):
                stored.pop(rid)
            elif not count or not self._early.fit(names, found):
                self._decline(rid)
            else:
                self._start(scheduler, req, names, found)

    def progress(
        self, states: Mapping[str, RequestState]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Take in residual KV that has arrived.

        Returns:
            The requests of which all has arrived, and those of which some will not.
        """
        complete, lost = [], []
        for rid, rest in self._rests.items():
            state = states[rid]
            for name, found in rest.arrived():
                at = rest.names.index(name) * SEGMENT
                noted = state.split.noted
                scores = [each[:, at : at + SEGMENT] for each in noted]
                own = torch.stack(scores).cpu() if scores else None
                if not self._early.take(name, found, own):
                    lost.append(rid)
                    break
            if rest.complete:
                complete.append(rid)
            elif rest.lost:
                lost.append(rid)
        return tuple(complete), tuple(dict.fromkeys(lost))

    def completed(self, state: RequestState) -> None:
        """Note that a request has its residual KV, and can be verified here."""
        self.forget(state.rid)

    def forget(self, rid: str) -> None:
        """End the read of a request that has its residual KV, or is released."""
        if self._rests.pop(rid, None) is not None and self._segments.stored is not None:
            self._segments.stored.pop(rid)

    def _find(self, scheduler: Any, rid: str) -> Req | None:
        """Return a request that may start; None if it is gone."""
        return next((each for each in scheduler.waiting_queue if each.rid == rid), None)

    def _comes_whole(self, names: Sequence[str]) -> bool:
        """Return whether another request has brought a prefix here meanwhile."""
        return self._segments.reach(names, 0) >= len(names) * SEGMENT

    def _decline(self, rid: str) -> None:
        """Let a request go on that cannot start."""
        if self._segments.stored is not None:
            self._segments.stored.read_whole(rid)

    def _fits(self, req: Req, budget: Budget) -> bool:
        """Return whether there can be room for the residual KV of a prompt."""
        staging = self._placement.prefetches.region.slots
        return budget.staged <= min(staging, self._placement.host_slots)

    def _begun(
        self, scheduler: Any, state: RequestState, found: Sequence[Found]
    ) -> None:
        self._read_rest(state, found)
        scheduler.waiting_queue.remove(state.req)

    def _read_rest(self, state: RequestState, found: Sequence[Found]) -> None:
        """Read the residual KV of a request that has started."""
        if self._segments.stored is not None:
            rest = self._segments.stored.start_early(state.rid, found)
            self._rests[state.rid] = rest

    def _count(self, req: Req, found: int) -> int:
        """Return how many of the segments found a request can start on; 0: none."""
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        recent = max(1, self._config.recent_tokens)
        count = max(0, min(found, (tokens - recent) // SEGMENT))
        suffix = tokens - count * SEGMENT
        if not count or suffix > longest_suffix(tokens):
            return 0
        budget = self._placement.compressor.of_segments(count)
        return count if self._fits(req, budget) else 0

    def _start(
        self, scheduler: Any, req: Req, names: Sequence[str], found: Sequence[Found]
    ) -> None:
        """Start a request; without a row or free slots nothing is changed."""
        tree, pool = scheduler.tree_cache, scheduler.req_to_token_pool
        page = self._placement.geometry.page_size
        tokens = len(req.origin_input_ids) + len(req.output_ids) - 1
        suffix = tokens - len(names) * SEGMENT
        pages = -(-suffix // page) * page
        budget = self._placement.compressor.of_segments(len(names))
        ahead = 2 * (self._config.most_drafts + 1) + page
        enough = room(tree) >= budget.slots + pages + ahead
        if not enough or not pool.available_size():
            return
        drafts = self._early.enter(req.rid, names, found, tree)
        if drafts is None:
            return
        own = allocate(tree, pages)
        if own is None:
            self._segments.release(req.rid)
            return
        pool.alloc([req])
        parts = self._early.parts(budget, names, drafts, found)
        self._early.list_row(req, parts, own[:suffix])
        req.cached_tokens = req.cached_tokens_storage = budget.offered
        batch = self._batch(scheduler, req)
        state = self._arrive(req, tokens)
        state.parts, state.inexact = parts, suffix
        self._begun(scheduler, state, found)
        self._placement.note(state)
        self._placement.counters.early_starts += 1
        running = scheduler.running_batch
        if running.is_empty():
            scheduler.running_batch = batch
        else:
            running.merge_batch(batch)

    def _batch(self, scheduler: Any, req: Req) -> ScheduleBatch:
        """Return the PREBUILT batch of a request whose row is listed."""
        for event in ("set_forward_entry_time", "set_prefill_finished_time"):
            set_time_batch([req], event)
        text = [*req.origin_input_ids, *req.output_ids]
        length = req.kv.kv_committed_len
        req.prefix_indices = torch.empty((0,), dtype=torch.int64)
        req.set_extend_range(0, len(req.origin_input_ids))
        batch = ScheduleBatch.init_new(
            [req],
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            scheduler.enable_overlap,
            scheduler.spec_algorithm,
        )
        batch.prepare_for_prebuilt()
        for lengths in (batch.seq_lens, batch.seq_lens_cpu, batch.orig_seq_lens):
            lengths.fill_(length)
        batch.seq_lens_sum = length
        if scheduler.enable_overlap:
            # A finished request may have a forward in flight over the row.
            scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
        last = torch.full_like(batch.seq_lens, text[-1])
        before = torch.full_like(batch.seq_lens, len(text) - 1)
        self._draft_tokens.start(batch.req_pool_indices, last, before)
        batch.spec_info = relayed(batch, scheduler.future_map)
        return batch
