"""The simulated server: the real runtime plans, modelled hardware executes."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError, InvariantError
from vericache_sglang.scheduling.estimates import Estimates
from vericache_sglang.scheduling.iteration_model import Work
from vericache_sglang.scheduling.plan import (
    Draft,
    Plain,
    Plan,
    RequestSpec,
    Residency,
    RowResult,
    SchedulerInput,
    Verify,
    Wait,
)
from vericache_sglang.scheduling.runtime import Runtime
from vericache_sglang.simulation.machine import SimulatedMachine
from vericache_sglang.simulation.metrics import (
    Gaps,
    Result,
    Run,
    SimulatedCounters,
    result,
)
from vericache_sglang.simulation.moves import SimulatedMoves
from vericache_sglang.simulation.requests import Running, SimulatedRequest
from vericache_sglang.simulation.setup import (
    Setup,
    cycle_slots,
    kept_slots,
    settings_for,
)

if TYPE_CHECKING:
    from vericache_sglang.scheduling.plan import RowAction
    from vericache_sglang.simulation.policies import Policy
    from vericache_sglang.simulation.timeline import Timeline

IDLE_S = 1e-3
"""Simulated seconds between two polls when no event is scheduled."""

RESERVED = (
    *("ring_link_reserved", "ring_staging_reserved"),
    *("staging_held_slots", "unplaced_cycles"),
)
"""Figures of the runtime's report that are 0 while no request runs."""

MOST_IDLE = 20_000
"""Polls in a row without a forward after which the schedule counts as stalled."""


class SimulatedServer:
    """Simulates one workload under one policy.

    Waiting requests are admitted first come, first served, when their whole prompt fits
    and no request is swapped out. When device memory runs out in spite of the runtime,
    the newest request is retracted and prefilled again, as in SGLang (of a precomputed
    prompt only the decoded tokens). Answers end at their limit, never at a stop token.

    Args:
        setup: Machine and workload.
        policy: The runtime's settings.
        timeline: Receives forwards and copies; None records nothing.
    """

    def __init__(
        self, setup: Setup, policy: Policy, timeline: Timeline | None = None
    ) -> None:
        self.setup = setup
        self.policy = policy
        self.timeline = timeline
        settings = settings_for(setup, policy)
        self.runtime = Runtime(settings, Estimates())
        self.machine = SimulatedMachine(
            setup.costs, settings.staging_slots, setup.host_slots
        )
        self.offloader = SimulatedMoves(
            self.machine,
            self.runtime.estimates,
            prefetch_fraction=settings.transfer_fraction,
            coalesce=policy.coalesce,
            precomputed=setup.precomputed,
        )
        self.running: dict[str, Running] = {}
        self.counters = SimulatedCounters()
        self.emitted: dict[str, int] = {}
        self._state_factory = setup.workload.stream()
        self._next: SimulatedRequest | None = next(self._state_factory, None)
        self._retracted: deque[Running] = deque()
        self._gaps = Gaps()
        self._start = SimulatedCounters()
        self._idle = 0
        self._cycle_slots = cycle_slots(setup, policy)

    def run(self) -> Result:
        """Simulate the workload to its end and return the figures.

        Raises:
            ConfigError: A request cannot fit into the device even alone.
            InvariantError: The runtime broke an invariant, or the schedule is stalled.
        """
        while self.counters.finished < self.setup.workload.finish:
            self._admit_waiting()
            if self.running:
                self._make_room()
                self._iterate()
            elif self._next is not None:
                self.machine.advance(max(self._next.arrival_s, self.machine.now))
            else:
                break
        if self.timeline is not None:
            self.timeline.to_device = self.machine.to_device.copies
            self.timeline.to_host = self.machine.to_host.copies
        end = self.counters.at(self.machine)
        return result(
            Run(
                policy=self.policy.name,
                machine=self.machine,
                start=self._start,
                end=end,
                held=self._held_at_end(),
                gaps=self._gaps,
                swapped_waits_s=self.offloader.swapped_waits_s,
                deadline_misses=int(
                    self.runtime.pacing.report().get("deadline_misses", 0)
                ),
            )
        )

    def _held_at_end(self) -> dict[str, int]:
        """Return the amounts held after the last request; empty if requests are left.

        Copies in flight end first, as they hold their slots until then.
        """
        if self.running or self._retracted or self._next is not None:
            return {}
        while (event := self.machine.next_event()) is not None:
            self.machine.advance(event)
        machine, told = self.machine, self.runtime.figures()
        rooms = (machine.pool, machine.staging, machine.host)
        return {
            **{room.name: room.used for room in rooms},
            "requests": len(self.runtime.tracks),
            **{name: int(told.get(name, 0)) for name in RESERVED},
        }

    # -- admission --------------------------------------------------------------

    def _admit_waiting(self) -> None:
        while self._below_limit() and not self._swapped():
            head = self._head()
            if head is None:
                break
            self._check_fits_alone(head)
            event = self.machine.next_event()
            if not self._fits(head):
                if self.running or event is None:
                    return
                # Only the end of copies to the host can free slots.
                self.machine.advance(event)
                continue
            if self._retracted:
                self._retracted.popleft()
            else:
                self._next = next(self._state_factory, None)
            self._enter(head)

    def _head(self) -> Running | None:
        """Return the first waiting request, if it has arrived."""
        if self._retracted:
            return self._retracted[0]
        request = self._next
        if request is None or request.arrival_s > self.machine.now:
            return None
        return self._new_state(request)

    def _below_limit(self) -> bool:
        limit = self.setup.workload.concurrency
        return limit is None or len(self.running) < limit

    def _swapped(self) -> int:
        return sum(
            state.residency is Residency.SWAPPED for state in self.running.values()
        )

    def _new_state(self, request: SimulatedRequest) -> Running:
        kept = kept_slots(request.prompt, self.policy.keep)
        if self.policy.accept is not None:
            request = replace(request, accept=self.policy.accept)
        return Running(
            request=request,
            luck=Random(f"{self.setup.seed}/{request.rid}"),
            proposal_luck=Random(f"{self.setup.seed}/{request.rid}/proposals"),
            dropped=request.prompt - kept,
        )

    def _fits(self, head: Running) -> bool:
        rows = len(self.running) + 1
        growth = sum(state.remaining for state in self.running.values())
        growth = int((growth + head.remaining) * self.setup.reserve)
        room = max(growth, rows) + rows * self._cycle_slots
        return head.tokens + room <= self.machine.pool.free

    def _check_fits_alone(self, head: Running) -> None:
        need = head.tokens + head.remaining + self._cycle_slots
        if need > self.machine.pool.total:
            raise ConfigError(
                f"a request of {need} KV slots does not fit: {self.policy.name} has "
                f"{self.machine.pool.total}; lower --context or --output"
            )

    def _enter(self, state: Running) -> None:
        state.at_base = state.emitted
        self.machine.pool.take(state.base)
        state.held = state.base
        new = state.emitted if self.setup.precomputed else state.base
        if new:
            # Causal attention: half of all token pairs.
            work = Work(new, state.base, new * (2 * state.base - new) // 2)
            self.machine.advance(self.machine.now + self.setup.costs.forward_s(work))
        state.burst_s = self.machine.now
        self.running[state.rid] = state
        self.emitted.setdefault(state.rid, 0)
        drafts, proposals = self.policy.drafts, self.setup.proposals
        if drafts or proposals:
            self.runtime.arrive(
                RequestSpec(
                    rid=state.rid,
                    prompt=state.base,
                    kept=state.kept if drafts else 0,
                    dropped=state.dropped if drafts else 0,
                    remaining=state.remaining,
                    compressible=drafts,
                    proposals=proposals,
                )
            )

    def _make_room(self) -> None:
        """Ensure free slots for every row; retract the newest requests otherwise."""
        while True:
            active = [
                state
                for state in self.running.values()
                if state.residency is not Residency.SWAPPED
            ]
            if self.machine.pool.free >= len(active) * (1 + self.setup.proposals):
                return
            event = self.machine.next_event()
            if event is not None and self.machine.to_host.free_at > self.machine.now:
                self.machine.advance(event)
                continue
            if len(active) < 2:
                raise InvariantError(f"{active} cannot grow any more")
            self._retract(active[-1])

    def _retract(self, state: Running) -> None:
        self.runtime.leave(state.rid)
        self.offloader.leave(state)
        del self.running[state.rid]
        state.drafts, state.split = 0, False
        state.residency = Residency.DEVICE
        self._retracted.appendleft(state)
        self.counters.retractions += 1

    # -- one iteration ----------------------------------------------------------

    def _iterate(self) -> None:
        plan = self._plan()
        for stage_in in plan.stage_ins:
            self.offloader.stage(self.running[stage_in.rid])
        actions = {rid: plan.rows.get(rid, Plain(rid)) for rid in list(self.running)}
        work = self._begin_forward(actions)
        if work.tokens:
            self._idle = 0
            self._forward(work, actions)
            self._settle(actions)
        else:
            self._wait()
        for move in plan.moves:
            state = self.running.get(move.rid)
            if state is None:
                continue
            if self.offloader.perform(state, move):
                self.runtime.moved(move, self.offloader.group(state))
            else:
                self.runtime.refused(move)

    def _plan(self) -> Plan:
        # Run the events of this moment first: an arrival now is in time.
        self.machine.advance(self.machine.now)
        arrived, self.offloader.arrived = tuple(self.offloader.arrived), []
        # Memory that is freed admits no request beyond the limit.
        head = self._head() if self._below_limit() else None
        return self.runtime.plan(
            SchedulerInput(
                free_slots=self.machine.pool.free,
                host_slots=self.machine.host.free,
                rows=len(self.running) - self._swapped(),
                blocked=head is not None and not self._fits(head),
                arrived=arrived,
                proposals=self.setup.proposals,
            )
        )

    def _begin_forward(self, actions: dict[str, RowAction]) -> Work:
        """Allocate the slots that the forward writes, and return its work."""
        tokens = reads = products = 0
        for rid, action in actions.items():
            if isinstance(action, Wait):
                continue
            state = self.running[rid]
            self.machine.pool.take(1 + action.proposals)
            state.held += 1 + action.proposals
            count, slots = self._row(state, action)
            tokens += count
            reads += slots
            products += count * slots
        return Work(tokens, reads, products)

    def _row(self, state: Running, action: Plain | Draft | Verify) -> tuple[int, int]:
        """Return a row's query tokens and the slots it reads; count its draft."""
        k = action.proposals
        if state.residency is Residency.SWAPPED:
            raise InvariantError(f"{state.rid} is swapped out and runs")
        if isinstance(action, Draft):
            state.drafts += 1
            return 1 + k, state.draft_slots + k
        if isinstance(action, Verify):
            if state.residency is Residency.HOST and not state.arrived:
                raise InvariantError(f"{state.rid} is verified before its prefetch")
            return state.drafts + 1 + k, state.tokens + state.drafts + 1 + k
        if state.split:
            raise InvariantError(f"{state.rid} is split and decoded plainly")
        return 1 + k, state.tokens + 1 + k

    def _forward(self, work: Work, actions: dict[str, RowAction]) -> None:
        costs, counters, start = self.setup.costs, self.counters, self.machine.now
        seconds = costs.forward_s(work)
        self.machine.advance(start + seconds)
        self.runtime.estimates.iteration.observe(work, seconds)
        phases = Counter(type(action).__name__.lower() for action in actions.values())
        counters.iterations += 1
        counters.forward_s += seconds
        counters.hbm_s += costs.read_bytes(work) / costs.hbm_bytes_per_s
        counters.compute_s += costs.flops(work) / costs.flops_per_s
        swapped = self._swapped()
        counters.rows += len(actions) - swapped
        counters.waits += phases["wait"] - swapped
        if self.timeline is not None:
            self.timeline.forwards.append((start, self.machine.now, dict(phases)))

    def _wait(self) -> None:
        """Advance to the next event, as no request runs."""
        self._idle += 1
        if self._idle > MOST_IDLE:
            raise InvariantError(f"nothing runs any more: {self.runtime.figures()}")
        start, event = self.machine.now, self.machine.next_event()
        self.machine.advance(start + IDLE_S if event is None else max(event, start))
        if self.timeline is not None:
            waiting = {"wait": len(self.running)}
            self.timeline.forwards.append((start, self.machine.now, waiting))

    def _settle(self, actions: dict[str, RowAction]) -> None:
        """Report the forward's results, and count the tokens that it emitted."""
        results = {
            rid: self._outcome(self.running[rid], action)
            for rid, action in actions.items()
            if not isinstance(action, Wait)
        }
        self.runtime.report(
            outcome
            for rid, outcome in results.items()
            if isinstance(actions[rid], Verify) or outcome.proposed
        )
        for rid, outcome in results.items():
            if outcome.emitted:
                self._emit(self.running[rid], outcome.emitted)

    def _outcome(self, state: Running, action: Plain | Draft | Verify) -> RowResult:
        """Return a row's result; rejected drafts and proposals free their slots."""
        proposed = action.proposals
        agreed = state.agreed(proposed, self.setup.proposal_accept)
        drafted = accepted = emitted = 0
        if isinstance(action, Draft):
            state.drafts += agreed
            drafted = 1 + agreed
        else:
            if isinstance(action, Verify):
                drafted, state.drafts = state.drafts, 0
                accepted = state.accepted(drafted)
                self._count_cycle(state, drafted, accepted)
            agreed = agreed if accepted == drafted else 0
            emitted = accepted + 1 + agreed
            self._give(state, drafted - accepted)
        self._give(state, proposed - agreed)
        return RowResult(state.rid, drafted, emitted, proposed)

    def _count_cycle(self, state: Running, drafted: int, accepted: int) -> None:
        self.counters.cycles += drafted > 0
        self.counters.drafted += drafted
        self.counters.accepted += accepted
        self.offloader.unstage(state)

    def _give(self, state: Running, slots: int) -> None:
        self.machine.pool.give(slots)
        state.held -= slots

    def _emit(self, state: Running, tokens: int) -> None:
        if tokens > state.remaining:
            raise InvariantError(f"{state.rid} emits {tokens} of {state.remaining}")
        now = self.machine.now
        self._gaps.bursts.append((now - state.burst_s, tokens))
        state.burst_s = now
        state.emitted += tokens
        self.emitted[state.rid] += tokens
        self.counters.tokens += tokens
        if state.remaining == 0:
            self._finish(state)

    def _finish(self, state: Running) -> None:
        self.runtime.leave(state.rid)
        self.offloader.leave(state)
        del self.running[state.rid]
        self.counters.finished += 1
        if self.counters.finished == self.setup.workload.warm:
            self._start = self.counters.at(self.machine)
            self._gaps = Gaps()
