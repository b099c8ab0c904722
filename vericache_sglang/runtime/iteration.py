"""One decode iteration: plan, launch one forward, carry out the plan's moves."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.device.upload import upload
from vericache_sglang.errors import CompressionError, LostKVError
from vericache_sglang.kv.row_edit import room
from vericache_sglang.observability.counters import move_name
from vericache_sglang.runtime.departure import last_action
from vericache_sglang.runtime.forward.autoregressive import run_plain, samples_as_sglang
from vericache_sglang.runtime.forward.spec_input import hidden_mode, take_hidden
from vericache_sglang.runtime.forward_times import ForwardTimes, Prefill
from vericache_sglang.scheduling.iteration_model import Work
from vericache_sglang.scheduling.plan import (
    Complete,
    Move,
    Plain,
    Plan,
    Residency,
    RowAction,
    SchedulerInput,
    Verify,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.observability.iteration_reporter import IterationReporter
    from vericache_sglang.runtime.admission import RequestAdmission
    from vericache_sglang.runtime.early_starts import EarlyStarts
    from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
    from vericache_sglang.runtime.forward.mixed import MixedForward
    from vericache_sglang.runtime.forward.proposals import InnerProposer
    from vericache_sglang.runtime.in_flight import InFlightQueue
    from vericache_sglang.runtime.placement import KVPlacement
    from vericache_sglang.runtime.recovery import Recovery
    from vericache_sglang.runtime.remote_rows import RemoteRows
    from vericache_sglang.runtime.result_recorder import ResultRecorder
    from vericache_sglang.runtime.tp_sync import TensorParallelSync
    from vericache_sglang.scheduling.runtime import Runtime

logger = logging.getLogger(__name__)

IDLE_SECONDS = 2e-4
"""Sleep of an iteration in which every request waits, in seconds."""

OBSERVE_EVERY = 8
"""Iterations between two samples of the iteration time while no request drafts."""


@dataclass(slots=True, kw_only=True, eq=False)
class Decoding:
    """Plans and launches decode iterations; only moves wait for the device.

    Under SGLang's overlap schedule an iteration is launched while the previous forward
    runs, so it knows the results of the forward before that. Moves copy KV at positions
    that depend on lengths, so they are made after all results are recorded.

    Attributes:
        states: rid -> running request.
        target_worker: SGLang's ``TpModelWorker``.
        placement: Holds the requests' KV and carries out moves.
        runtime: Plans iterations.
        tp_sync: Tensor-parallel sync; its measurements observe iteration times.
        overlap: SGLang runs its overlap schedule.
        request_admission: Admits requests to the runtime.
        mixed: Runs planned rows.
        draft_tokens: Tokens of all requests.
        in_flight: In-flight forwards.
        recorder: Records autoregressive rows.
        recovery: Handles errors.
        reporter: Reports every iteration.
        max_running: Maximum running requests.
        proposer: Asks the inner drafter; None without one.
        early_starts: Takes in residual KV from the store; None if that is off.
        remote: Decides rows for other servers, or by them; None without a role.
    """

    states: dict[str, RequestState]
    target_worker: Any
    placement: KVPlacement
    runtime: Runtime
    tp_sync: TensorParallelSync
    overlap: bool
    request_admission: RequestAdmission
    mixed: MixedForward
    draft_tokens: DraftTokenBuffer
    in_flight: InFlightQueue
    recorder: ResultRecorder
    recovery: Recovery
    reporter: IterationReporter
    max_running: int
    proposer: InnerProposer | None = None
    early_starts: EarlyStarts | None = None
    remote: RemoteRows | None = None
    _times: ForwardTimes = field(init=False)

    def __post_init__(self) -> None:
        self._times = ForwardTimes(self.draft_tokens.device)

    @contextmanager
    def prefill(self, batch: ScheduleBatch) -> Iterator[None]:
        """Time a prefill, and not the forward behind it."""
        self._observe_times()
        self._times.end(None, 0.0)  # of the work before it
        try:
            yield
            self._times.end(Prefill(_completed(batch)), 0.0)
        finally:
            self._times.interrupt()

    def _observe_times(self) -> None:
        """Record the times of forwards that have ended."""
        measured = self.tp_sync.measured
        for done, seconds in self._times.observed():
            if isinstance(done, Prefill):
                measured.observe_prefill(done.tokens, seconds)
            else:
                measured.iteration.observe(done, seconds)

    def run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one iteration of SGLang's decode batch.

        After an error every request of the batch is prefilled again, because a
        partially executed plan leaves the placement of KV unknown. A forward that was
        launched is dropped, as it may have been launched on some ranks only.
        """
        launched = self.in_flight.launched
        self.tp_sync.begin()
        try:
            result = self._run(batch)
            if self.tp_sync.expected:
                self.tp_sync.agree(last=True)
            return result
        except Exception as error:  # noqa: BLE001 (raised again where it has to be)
            self.recovery.all_lost(error)
        self.in_flight.drop(launched)
        result = self.mixed.nothing(batch)
        self._times.interrupt()
        # Unused: no request of the batch is decoded from these lengths.
        result.new_seq_lens = batch.seq_lens
        self.target_worker.model_runner.shared_read_done_event = None
        return result

    def _run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        self._observe_times()
        self.in_flight.record_all_but_newest()
        self.placement.counters.note_iteration(len(batch.reqs))
        # A batch with a grammar processes the last result between choosing the batch
        # and running it, so a request may have ended, and lost its row, already.
        requests = {
            i: self.states[req.rid]
            for i, req in enumerate(batch.reqs)
            if req.rid in self.states
        }
        states = list(requests.values())
        all_here = len(states) == len(batch.reqs)
        probed = self.request_admission.pass_on(batch, requests)
        if probed:
            self._times.interrupt()
        as_sglang = all_here and samples_as_sglang(states, batch.sampling_info)
        served = self.remote is not None and self.remote.busy
        if as_sglang and not (self.runtime.tracks or served or probed):
            # Nothing to plan and nothing to draft: as fast as plain SGLang.
            self.reporter.begin(requests, None)
            result = self._run_plain(batch, states, last=self.overlap)
            self.reporter.end(())
            return result
        plan = self._plan(batch, states)
        remote = self._remote(plan, requests)
        actions = {
            i: remote.get(i)
            or last_action(state)
            or plan.rows.get(state.rid)
            or Plain(state.rid)
            for i, state in requests.items()
        }
        self.reporter.begin(requests, actions)
        # Under overlap the ranks meet before SGLang processes this result. Moves
        # communicate, so ranks that make them would not be at that meeting.
        last = self.overlap and not plan.moves
        plain = as_sglang and all(
            isinstance(action, Plain) and not action.proposals
            for action in actions.values()
        )
        if plain:
            result = self._run_plain(batch, states, last=last)
        else:
            ready = self.tp_sync.forward(last=last)
            result, work = self.mixed.run(
                batch, requests, actions, ready, self.proposer
            )
            if work is None:
                self._times.interrupt()
                self._rest()
            else:
                self._time(work)
        moves = self._make_moves(plan, batch)
        if plan.moves:
            # Moves, also abandoned ones, edit rows and the free list after the event
            # at which SGLang considers them read. Without the event the scheduler's
            # stream waits for everything that was launched.
            self.target_worker.model_runner.shared_read_done_event = None
            self._times.interrupt()
        if plan.moves or not plain:  # else one token more each, as returned
            self._publish(result, requests, len(batch.reqs))
        self.reporter.end(moves)
        return result

    def _remote(
        self, plan: Plan, requests: dict[int, RequestState]
    ) -> dict[int, RowAction]:
        """Return the actions that other servers decide, by index in the batch."""
        if self.remote is None:
            return {}
        planned = sum(isinstance(action, Verify) for action in plan.rows.values())
        room = len(self.placement.verify_rows) - planned
        return self.remote.actions(requests, room)

    def _rest(self) -> None:
        """Let time pass in an iteration in which every request waits."""
        if self.remote is None or self.in_flight.unrecorded:
            time.sleep(IDLE_SECONDS)
        else:
            self.remote.wait()

    def _plan(self, batch: ScheduleBatch, states: list[RequestState]) -> Plan:
        complete: tuple[str, ...] = ()
        if self.early_starts is not None:
            complete, lost = self.early_starts.progress(self.states)
            for rid in lost:
                self.early_starts.forget(rid)
                self.recovery.lose(self.states[rid])
        rows = len(states)
        prefetches = self.placement.prefetches
        self.placement.poll_outgoing()
        reported = self.tp_sync.sync_inputs(
            self.placement.host_slots, prefetches.progress()
        )
        arrived, failed = prefetches.poll(reported.prefetches)
        # Of no request where every text was read, which is nearly always.
        unread = self.proposer.prepare() if self.proposer else ()
        given = SchedulerInput(
            free_slots=room(batch.tree_cache),
            host_slots=reported.host_slots,
            rows=rows,
            blocked=bool(batch.batch_is_full) and rows < self.max_running,
            arrived=tuple(arrived),
            failed=tuple(failed),
            complete=complete,
            proposals=self.proposer.most if self.proposer else 0,
            unready=frozenset(
                state.rid for state in states if state.req_pool_idx in unread
            )
            if unread
            else frozenset(),
        )
        plan = self.runtime.plan(given)
        self.tp_sync.check(given, plan)
        for rid in plan.abandoned:
            self.recovery.lose(self.states[rid])
        for stage_in in plan.stage_ins:
            state = self.states[stage_in.rid]
            with self.recovery.of_request(state):
                state.stats.staged_bytes += self.placement.start_prefetch(state)
        self.placement.counters.note_drafting(self.runtime.drafting)
        return plan

    def _make_moves(self, plan: Plan, batch: ScheduleBatch) -> list[Move]:
        """Carry out a plan's moves; return those that were made."""
        done: list[Move] = []
        if plan.moves:
            self.in_flight.record_all()
        for move in plan.moves:
            state = self.states.get(move.rid)
            if state is None or state.lost:
                continue
            try:
                made = self.placement.make(move, state, batch.tree_cache)
            except (LostKVError, CompressionError) as error:
                logger.error("VeriCache: %s: %s", state.rid, error)
                if isinstance(error, CompressionError):
                    self.placement.guard.abandon(state.rid)
                self.recovery.lose(state)
                continue
            if not made:
                self.runtime.refused(move)
                continue
            if self.early_starts is not None and isinstance(move, Complete):
                self.early_starts.completed(state)
            state.stats.moves[move_name(move)] += 1
            on_host = state.residency is Residency.HOST
            group = self.placement.staging_key(state.rid) if on_host else ""
            self.runtime.moved(move, group)
            batch.batch_is_full = False  # let SGLang try admission again
            done.append(move)
        return done

    def _publish(
        self,
        result: GenerationBatchResult,
        requests: dict[int, RequestState],
        rows: int,
    ) -> None:
        """Set the device lengths of all rows in SGLang's result."""
        # Row 0 is padding, of which nothing is verified.
        lengths, own = [1] * rows, [0] * rows
        for i, state in requests.items():
            lengths[i] = state.row_length - state.verified
            own[i] = state.req_pool_idx
        further, pool_indices = upload(self.draft_tokens.device, lengths, own)
        result.new_seq_lens = self.draft_tokens.verified(pool_indices) + further

    def _time(self, work: Work | None) -> None:
        """Time the forward that was just launched; None: its time is not asked for."""
        # The inner drafter's time is not the forward's; it is priced by itself.
        self._times.end(work, 0.0 if self.proposer is None else self.proposer.spent_s)

    def _run_plain(
        self, batch: ScheduleBatch, states: list[RequestState], *, last: bool
    ) -> GenerationBatchResult:
        """Decode every request autoregressively; sample its time periodically."""
        counted, work = self.placement.counters.iterations, None
        if self.runtime.tracks or counted % OBSERVE_EVERY == 0:
            reads = sum(state.verified for state in states) + len(states)
            work = Work(len(states), reads, reads)
        self.placement.counters.plain_rows += len(states)
        launched = run_plain(
            batch,
            states,
            self.draft_tokens,
            self.recorder,
            lambda batch: self._forward(batch, states, last=last),
        )
        self._time(work)
        self.in_flight.launch(launched)
        if not all(state.asynchronous for state in states):
            self.in_flight.record_all()
        result: GenerationBatchResult = launched.result
        return result

    def _forward(
        self, batch: ScheduleBatch, states: list[RequestState], *, last: bool
    ) -> GenerationBatchResult:
        """Run SGLang's decode; the inner drafter may read what it computes."""
        proposer = self.proposer
        features = proposer is not None and proposer.reads(states)
        with self.tp_sync.forward(last=last):
            result: GenerationBatchResult = self.target_worker.forward_batch_generation(
                batch, capture_hidden_mode=hidden_mode(features=features)
            )
        if proposer is not None and features:
            requests = batch.req_pool_indices.to(torch.int64)
            position = self.draft_tokens.verified(requests)
            proposer.observe(requests, position, take_hidden(result))
        return result


def _completed(batch: ScheduleBatch) -> int:
    """Return the prompt tokens of the new requests whose prefill a batch completes."""
    if not batch.forward_mode.is_extend():
        return 0
    parts = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
    return sum(
        len(req.origin_input_ids)
        for req, start, count in parts
        if not req.output_ids and start + count == len(req.origin_input_ids)
    )
