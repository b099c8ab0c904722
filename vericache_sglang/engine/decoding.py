"""One decode iteration: plan, launch one forward, make the plan's moves."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vericache_sglang.engine.departure import last_action
from vericache_sglang.engine.plain import run_plain, samples_as_sglang
from vericache_sglang.engine.row_edit import room
from vericache_sglang.engine.state import Layout, RequestState
from vericache_sglang.engine.upload import upload
from vericache_sglang.errors import CompressionError, LostKVError
from vericache_sglang.scheduling.iteration_model import Work
from vericache_sglang.scheduling.plan import Draft, Move, Plain, Plan, Wait, World

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

    from vericache_sglang.engine.agreement import Agreement
    from vericache_sglang.engine.conclusion import Conclusion
    from vericache_sglang.engine.entrance import Entrance
    from vericache_sglang.engine.flights import Flights
    from vericache_sglang.engine.mixed import MixedForward
    from vericache_sglang.engine.recovery import Recovery
    from vericache_sglang.engine.residence import Residence
    from vericache_sglang.engine.token_board import TokenBoard
    from vericache_sglang.observability.iteration_reporter import IterationReporter
    from vericache_sglang.scheduling.runtime import Runtime

logger = logging.getLogger(__name__)

IDLE_SECONDS = 2e-4
"""Pause of an iteration in which every request waits for its reload."""

OBSERVE_EVERY = 8
"""Iterations between two samples of the iteration's time while nobody drafts."""


@dataclass(slots=True, kw_only=True, eq=False)
class Decoding:
    """Decides and launches; nothing here waits for the device but moves.

    Under SGLang's overlap schedule an iteration is launched while the last one's
    forward runs, so it knows the outcome of the one before that. Moves copy KV whose
    place depends on lengths, so they are made with every outcome known.

    Attributes:
        states: Requests that live, by rid.
        target_worker: SGLang's ``TpModelWorker``.
        residence: Where the parts are, and moves.
        runtime: Plans.
        agreement: Of the ranks; what it measures learns of iterations.
        entrance: Hands requests over.
        mixed: Runs planned rows.
        board: Tokens of all requests.
        flights: Forwards in the air.
        conclusion: Is told of plain rows.
        recovery: Decides what an error costs.
        watch: Is told of every iteration.
        max_running: Most requests SGLang runs.
    """

    states: dict[str, RequestState]
    target_worker: Any
    residence: Residence
    runtime: Runtime
    agreement: Agreement
    entrance: Entrance
    mixed: MixedForward
    board: TokenBoard
    flights: Flights
    conclusion: Conclusion
    recovery: Recovery
    watch: IterationReporter
    max_running: int
    _launched: float = field(default=0.0, init=False)
    _work: Work | None = field(default=None, init=False)

    def interrupt(self) -> None:
        """Say that a prefill runs: the time until the next decode is not one's."""
        self._work = None

    def run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one iteration of SGLang's decode batch.

        After an error every request of it is prefilled again: of a plan that was
        carried out in part nobody knows what holds.
        """
        launched = self.flights.launched
        try:
            return self._run(batch)
        except Exception as error:  # noqa: BLE001 (raised again where it has to be)
            self.recovery.all_lost(error)
        last = self.flights.last
        if last is None or self.flights.launched == launched:
            result = self.mixed.nothing(batch)
        else:
            result = last.result
        self._work = None
        # Nobody reads them: no request of the batch is decoded from them.
        result.new_seq_lens = batch.seq_lens
        self.target_worker.model_runner.shared_read_done_event = None
        return result

    def _run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        self._observe_last()
        self.flights.land_all_but_last()
        self.residence.counters.note_iteration(len(batch.reqs))
        # A batch with a grammar processes the last result between choosing the batch
        # and running it, so a request may have ended, and lost its row, already.
        seats = {
            i: self.states[req.rid]
            for i, req in enumerate(batch.reqs)
            if req.rid in self.states
        }
        states = list(seats.values())
        all_here = len(states) == len(batch.reqs)
        self.entrance.pass_on(batch, seats)
        as_sglang = all_here and samples_as_sglang(states, batch.sampling_info)
        if as_sglang and not self.runtime.tracks:
            # Nothing to plan and nothing to draft: no slower than plain SGLang.
            self.watch.begin(seats, None)
            result = self._run_plain(batch, states)
            self.watch.end(())
            return result
        plan = self._plan(batch, len(states))
        actions = {
            i: last_action(state) or plan.rows.get(state.rid) or Plain(state.rid)
            for i, state in seats.items()
        }
        if any(
            state.loose and not isinstance(actions[i], (Draft, Wait))
            for i, state in seats.items()
        ):  # the board knows one unheard emission of a request, not two
            self.flights.land_all()
        self.watch.begin(seats, actions)
        if as_sglang and all(isinstance(action, Plain) for action in actions.values()):
            result = self._run_plain(batch, states)
        else:
            result, self._work = self.mixed.run(batch, seats, actions)
            if self._work is None:
                time.sleep(IDLE_SECONDS)
        moves = self._make_moves(plan, batch)
        if plan.moves:
            # They edit rows and the free list behind the event at which SGLang takes
            # them for read, also those that are given up half way; without the event
            # the scheduler's stream waits for all that was launched.
            self.target_worker.model_runner.shared_read_done_event = None
        self._publish(result, seats, len(batch.reqs))
        self.watch.end(moves)
        return result

    def _plan(self, batch: ScheduleBatch, rows: int) -> Plan:
        reloads = self.residence.reloads
        self.residence.poll_outgoing()
        heard = self.agreement.hear(self.residence.host_slots, reloads.progress())
        arrived, failed = reloads.poll(heard.reloads)
        for rid in failed:
            self._note_failure(rid)
        world = World(
            free_slots=room(batch.tree_cache),
            host_slots=heard.host_slots,
            rows=rows,
            blocked=bool(batch.batch_is_full) and rows < self.max_running,
            arrived=tuple(arrived),
            failed=tuple(failed),
        )
        plan = self.runtime.plan(world)
        self.agreement.check(world, plan)
        for stage_in in plan.stage_ins:
            state = self.states[stage_in.rid]
            with self.recovery.of_request(state):
                state.figures.staged_bytes += self.residence.start_reload(state)
        self.residence.counters.note_drafting(self.runtime.drafting)
        return plan

    def _note_failure(self, rid: str) -> None:
        """Count a failed reload; the second in a row costs the request its KV."""
        if self.runtime.gives_up(rid):
            self.recovery.lose(self.states[rid])

    def _make_moves(self, plan: Plan, batch: ScheduleBatch) -> list[Move]:
        """Carry out what a plan moves; return what was moved."""
        done: list[Move] = []
        if plan.moves:
            self.flights.land_all()
        for move in plan.moves:
            state = self.states.get(move.rid)
            if state is None or state.lost:
                continue
            try:
                made = self.residence.make(move, state, batch.tree_cache)
            except (LostKVError, CompressionError) as error:
                logger.error("VeriCache: %s: %s", state.rid, error)
                if isinstance(error, CompressionError):
                    self.residence.guard.give_up(state.rid)
                self.recovery.lose(state)
                continue
            if not made:
                self.runtime.refused(move)
                continue
            state.figures.moves[type(move).__name__.lower()] += 1
            on_host = state.layout is Layout.KEPT
            group = self.residence.staging_key(state.rid) if on_host else ""
            self.runtime.moved(move, group)
            batch.batch_is_full = False  # ask again whether somebody fits
            done.append(move)
        return done

    def _publish(
        self, result: GenerationBatchResult, seats: dict[int, RequestState], rows: int
    ) -> None:
        """Tell SGLang how long every row is, on the device."""
        lengths, own, loose = [1] * rows, [0] * rows, [0] * rows
        for i, state in seats.items():
            lengths[i], loose[i] = state.row_length, state.loose
            own[i] = state.seat
        certain, seat, unheard = upload(self.board.device, lengths, own, loose)
        result.new_seq_lens = certain + self.board.extra(seat, unheard)

    def _observe_last(self) -> None:
        """Learn from the last iteration, launch to launch, if it was a decode too."""
        now = time.perf_counter()
        if self._work is not None:
            self.agreement.measured.iteration.observe(self._work, now - self._launched)
            self._work = None
        self._launched = now

    def _run_plain(
        self, batch: ScheduleBatch, states: list[RequestState]
    ) -> GenerationBatchResult:
        """Decode every request plainly; learn from it now and then."""
        counted = self.residence.counters.iterations
        if self.runtime.tracks or counted % OBSERVE_EVERY == 0:
            reads = sum(state.verified for state in states) + len(states)
            self._work = Work(len(states), reads, reads)
        self.residence.counters.plain_rows += len(states)
        launched = run_plain(
            batch, states, self.target_worker, self.board, self.conclusion
        )
        self.flights.launch(launched)
        if not all(state.late for state in states):
            self.flights.land_all()
        result: GenerationBatchResult = launched.result
        return result
