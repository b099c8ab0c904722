"""The paper's execution loop: plans every scheduler iteration, executes none.

The server's engine and the simulator drive the same class: they execute its plans and
report the results. A plan depends on what was reported alone, so tensor-parallel ranks
that report equal results make equal plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from vericache_sglang.scheduling.acceptance import Acceptance, Prior
from vericache_sglang.scheduling.draft_length import Patience, RoundCost, best_length
from vericache_sglang.scheduling.estimates import Estimates, proposal_prior
from vericache_sglang.scheduling.lockstep import LockStep
from vericache_sglang.scheduling.plan import (
    Complete,
    Compress,
    Draft,
    Load,
    Move,
    Offload,
    Plain,
    Plan,
    Prefetch,
    RequestSpec,
    Residency,
    Restore,
    RowAction,
    RowResult,
    SchedulerInput,
    SwapIn,
    SwapOut,
    Verify,
)
from vericache_sglang.scheduling.proposals import Proposals
from vericache_sglang.scheduling.residency import LEAVE, ResidencyPolicy
from vericache_sglang.scheduling.scheduled_request import ScheduledRequest
from vericache_sglang.scheduling.staggered import Staggered
from vericache_sglang.scheduling.throughput import Throughput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vericache_sglang.scheduling.iteration_model import Work
    from vericache_sglang.scheduling.pacing import Pacing
    from vericache_sglang.scheduling.settings import RuntimeSettings

PRICE_EVERY = 64
"""Iterations after which a request's draft length is chosen again."""

PRICE_STEP = 0.25
"""Relative change of the rejection probability that renews the draft length."""

LEAST_STEP = 0.005
"""Change of the acceptance probability that is always ignored."""

NEVER = 1 << 62
"""Iteration that does not come."""

MAX_FAILURES = 2
"""Failed prefetches in a row after which a request's residual KV is abandoned."""


class Runtime:
    """Tracks every request that may speculate and plans each iteration.

    Args:
        settings: Fixed settings.
        estimates: Measured costs; the caller updates them.
    """

    def __init__(
        self, settings: RuntimeSettings, estimates: Estimates | None = None
    ) -> None:
        self.settings = settings
        self.estimates = estimates or Estimates()
        self.throughput = Throughput(settings, self.estimates)
        self.policy = ResidencyPolicy(settings, self.throughput)
        self.pacing = _pacing(settings, self.throughput, self.estimates)
        self.tracks: dict[str, ScheduledRequest] = {}
        self.now = 0
        self.disabled_speculations = 0
        self._whole: dict[str, ScheduledRequest] = {}
        self._swapped: dict[str, ScheduledRequest] = {}
        self._leaving: dict[str, ScheduledRequest] = {}
        self._verified: dict[str, ScheduledRequest] = {}
        self._host_slots: dict[str, list[int]] = {}
        self._link_slots = 0

    # -- events -----------------------------------------------------------------

    def arrive(self, spec: RequestSpec) -> None:
        """Add a request that starts decoding, with its full KV on the device."""
        track = self._begin_tracking(spec)
        track.settled_at = track.look_at = self.now + 1 + spec.ready_in
        if spec.compressible:
            self.estimates.prior.age()
        else:
            track.look_at = NEVER
        self._choose_proposals(track)
        self._whole[spec.rid] = track

    def arrive_early(self, spec: RequestSpec) -> None:
        """Add a request of whose prompt only the draft KV is there.

        It drafts as far as it may, and waits until ``Complete`` was made.
        """
        track = self._begin_tracking(spec)
        track.split, track.residency = True, Residency.STORE
        track.most = track.cap(self.settings.draft_length)
        self._choose_proposals(track)

    def probes_pay(self, spec: RequestSpec, rows: int, probes: Iterable[Work]) -> bool:
        """Return whether compressing a prompt would pay for its probes too.

        Args:
            spec: Of a request that has not arrived.
            rows: Running requests.
            probes: Work of each of its probes.
        """
        self.throughput.refresh(rows)
        probes_s = sum(map(self.estimates.iteration.predict, probes))
        return self.policy.probes_pay(self._track_of(spec), probes_s)

    def _begin_tracking(self, spec: RequestSpec) -> ScheduledRequest:
        track = self._track_of(spec)
        self.tracks[spec.rid] = track
        return track

    def _track_of(self, spec: RequestSpec) -> ScheduledRequest:
        return ScheduledRequest(
            spec=spec,
            acceptance=Acceptance(self.estimates.prior),
            patience=Patience(),
            proposals=Proposals(
                Acceptance(self.estimates.proposal_prior), spec.proposals
            ),
            emitted_at=self.now,
        )

    def leave(self, rid: str) -> None:
        """Remove a request: finished, aborted or retracted."""
        track = self.tracks.pop(rid, None)
        if track is None:
            return
        self.pacing.end(track)
        self._uncount(track)
        for group in (self._whole, self._leaving, self._swapped, self._verified):
            group.pop(rid, None)

    def clear(self) -> None:
        """Remove every request, every reservation and what was learned from requests.

        After an error the ranks may have received the results of different forwards.
        """
        groups = (self._whole, self._swapped, self._leaving, self._verified)
        for group in (self.tracks, *groups):
            group.clear()
        self._host_slots.clear()
        self._link_slots = 0
        self.estimates.prior = Prior()
        self.estimates.proposal_prior = proposal_prior()
        self.policy = ResidencyPolicy(self.settings, self.throughput)
        # The windows of new rings start at 0.
        self.now = 0
        self.pacing = _pacing(self.settings, self.throughput, self.estimates)

    def report(self, results: Iterable[RowResult]) -> None:
        """Record the results of forwards that the plan could not foresee.

        A plan counts one token of every draft row, and every token that an emitting
        row runs as emitted, so that rows which precede its result never go beyond the
        request's last token. Reported are the results of verifications, of rows with
        proposals and of drafts that end their request, in the order of the forwards.

        Args:
            results: Those of requests that have ended are ignored.
        """
        for result in results:
            track = self.tracks.get(result.rid)
            if track is None:
                continue
            if not result.emitted:
                self._drafted(track, result)
                continue
            counted = result.drafted + result.proposed + 1
            self._emit(track, result.emitted - counted)
            accepted = min(result.emitted - 1, result.drafted)
            track.acceptance.observe(result.drafted, accepted)
            if result.proposed and not result.drafted:
                self._observe_proposals(track, result.proposed, result.emitted - 1)
            if self._verified.pop(track.rid, None) is not None:
                self._next_cycle(track)

    def record_verdict(
        self, rid: str, emitted: int, drafted: int, accepted: int, round_s: float
    ) -> None:
        """Record what another server has decided of a request that drafts here.

        It drafts one token more than is sent (``runtime/paired.py``), and no more than
        can be verified here, should its residual KV come.

        Args:
            rid: Request id; one that has ended is ignored.
            emitted: Tokens it has emitted, >= 1.
            drafted: Drafts that were verified, >= 0.
            accepted: Those that were accepted.
            round_s: Time from drafts to their verdict, in seconds.
        """
        track = self.tracks.get(rid)
        if track is None:
            return
        if drafted:
            track.acceptance.observe(drafted, accepted)
        self._emit(track, emitted)
        track.drafts, track.pending, track.waited, track.closed = 0, 0, 0, False
        longest = track.cap(self.settings.draft_length - 1)
        step_s = self.estimates.iteration.iteration_s.value
        track.length = 0
        if longest:
            # The draft that is not sent is run while the others travel.
            draft_s = step_s / track.proposals.pace
            cost = RoundCost(step_s, draft_s, max(step_s, round_s), 0.0, 0.0)
            track.length = best_length(track.acceptance.p, cost, longest).length
        track.most = track.length + 1 if track.remaining > 0 else -1

    def return_drafts(self, rid: str, drafts: int) -> None:
        """Take over a request that other servers have verified so far.

        Drafts were planned that gave way to their verdicts or waited for them.

        Args:
            rid: Request id; it has no forward in flight.
            drafts: What it has drafted since the last verdict.
        """
        self.tracks[rid].drafts, self.tracks[rid].pending = drafts, 0

    def moved(self, move: Move, group: str = "") -> None:
        """Record a move that the executor has made.

        Args:
            move: One of the last plan's moves.
            group: Key of the shared residual KV on the host; "" if it is not shared.
        """
        track = self.tracks[move.rid]
        track.moved_at = self.now
        if isinstance(move, SwapOut):
            self._end(track)
            track.residency = Residency.SWAPPED
            self._swapped[track.rid] = track
        elif isinstance(move, SwapIn):
            track.residency = Residency.HOST
            del self._swapped[track.rid]
            self._begin(track)
        elif isinstance(move, Restore):
            self._to_plain(track)
        elif isinstance(move, Load):
            self._end(track)
            self._uncount(track)
            track.residency, track.group = Residency.DEVICE, ""
            self._begin(track)
        else:
            self._split(track, move, group)

    def refused(self, move: Move) -> None:
        """Record a move for which the executor had no memory; it may be retried."""
        track = self.tracks[move.rid]
        track.put_off(self.now)
        self._leaving.pop(move.rid, None)

    @property
    def drafting(self) -> int:
        """Number of requests with a compressed prompt."""
        return len(self.tracks) - len(self._whole)

    # -- plans ------------------------------------------------------------------

    def plan(self, given: SchedulerInput) -> Plan:
        """Decide one iteration.

        Linear in requests, with a small constant: prefetches and verifications are
        looked up by their iteration.

        Args:
            given: Free memory, and the prefetches that ended since the last plan.
        """
        self._begin_before_results()
        self.now += 1
        self.throughput.refresh(given.rows)
        abandoned = self._note_prefetches(given)
        step = self.pacing.step(self.now)
        plan = Plan(
            iteration=self.now,
            abandoned=abandoned,
            stage_ins=tuple(Prefetch(track.rid) for track in step.stage_ins),
            rows=self._actions(step.verifies, given),
            moves=self._moves(given),
        )
        for track in step.verifies:
            self._end_cycle(track)
        return plan

    def figures(self) -> dict[str, int | float]:
        """Return estimates, ring amounts and request counts by residency, by name."""
        count = dict.fromkeys(Residency, 0)
        for track in self.tracks.values():
            count[track.residency] += 1
        return {
            **self.estimates.report(),
            **self.pacing.report(),
            **{f"requests_{kind.value}": n for kind, n in count.items()},
            "requests_drafting": self.drafting,
            "disabled_speculations": self.disabled_speculations,
        }

    # -- internals --------------------------------------------------------------

    def _begin_before_results(self) -> None:
        """Begin the cycles whose last verification has no result yet.

        With one token left a further cycle would draft nothing; if drafts are rejected,
        more are left, so it begins with the result.
        """
        for track in [each for each in self._verified.values() if each.remaining > 1]:
            del self._verified[track.rid]
            self._next_cycle(track)

    def _note_prefetches(self, given: SchedulerInput) -> tuple[str, ...]:
        """Record ended prefetches; remove and return the requests they abandon."""
        abandoned = []
        for rid in given.arrived:
            track = self.tracks.get(rid)
            if track is None or not track.staged:
                continue
            track.ready = True
            if track.closed or track.drafts >= track.most:
                self.pacing.expedite(track)
        for rid in given.failed:
            track = self.tracks.get(rid)
            if track is None or not track.staged:
                continue
            track.failures += 1
            if track.failures == MAX_FAILURES:
                abandoned.append(rid)
                self.leave(rid)
                continue
            self.pacing.end(track)
            self.pacing.begin(track)
        return tuple(abandoned)

    def _actions(
        self, verifies: list[ScheduledRequest], given: SchedulerInput
    ) -> dict[str, RowAction]:
        """Return every request's action, and update its state as if it had run.

        Args:
            verifies: Requests that are verified.
            given: Says how much may be proposed, and for whom nothing.
        """
        proposals, unready = given.proposals, given.unready
        for track in verifies:
            track.most = -1
        rows: dict[str, RowAction] = {}
        now = self.now
        for rid, track in self.tracks.items():
            drafts, k = track.drafts, 0
            if drafts < track.most and self._may_draft(track):
                track.drafts = drafts + 1
                if proposals and rid not in unready:
                    k = self._proposals(track, proposals)
                track.pending += k
                rows[rid] = Draft(rid, k) if k else track.draft
            elif track.split or track.remaining <= 0:
                track.waited += 1
                rows[rid] = track.wait
            else:
                if proposals and rid not in unready:
                    k = self._proposals(track, proposals)
                track.remaining -= 1 + k
                track.emitted_at = now
                rows[rid] = Plain(rid, k) if k else track.plain
        for track in verifies:
            may = proposals and track.rid not in unready
            k = self._proposals(track, proposals) if may else 0
            track.pending += k
            rows[track.rid] = Verify(track.rid, k) if k else track.verify
        return rows

    def _may_draft(self, track: ScheduledRequest) -> bool:
        """Return whether one more draft fits, whatever the unreported rows drafted."""
        if not track.pending:
            return True
        settings = self.settings
        furthest = track.furthest(settings.draft_length, settings.proposals)
        return track.drafts + track.pending < furthest

    def _proposals(self, track: ScheduledRequest, most: int) -> int:
        """Return the proposals of a row, whose certain draft has been counted."""
        wanted = min(most, track.proposals.next(self.now))
        if not wanted:
            return 0
        settings = self.settings
        furthest = track.furthest(settings.draft_length, settings.proposals)
        return max(0, min(wanted, furthest - track.drafts - track.pending))

    def _observe_proposals(
        self, track: ScheduledRequest, proposed: int, accepted: int
    ) -> None:
        track.proposals.observe(proposed, accepted)
        self._choose_proposals(track)

    def _choose_proposals(self, track: ScheduledRequest) -> None:
        proposals = track.proposals
        if not proposals.most:
            return
        before = proposals.count
        proposals.choose(self.throughput.proposal_cost(track))
        if proposals.count != before:
            track.share = None

    def _moves(self, given: SchedulerInput) -> tuple[Move, ...]:
        complete = (self.tracks.get(rid) for rid in given.complete)
        taken = tuple(Complete(track.rid) for track in complete if _waits(track))
        if taken:
            return taken
        move = self.policy.leave_drafting(self._leaving.values(), self.now, given)
        if move is not None:
            return (move,)
        candidates = (
            track for track in self._whole.values() if track.look_at <= self.now
        )
        return self.policy.moves(
            self.tracks,
            self._swapped,
            candidates,
            self.now,
            given,
            self._link_load_s(),
        )

    def _split(self, track: ScheduledRequest, move: Move, group: str) -> None:
        to_host = isinstance(move, Offload | Complete) or (
            isinstance(move, Compress) and move.residency is Residency.HOST
        )
        if track.split:
            self._end(track)
        else:
            self._whole.pop(track.rid, None)
            track.split = True
        if to_host:
            track.residency, track.group = Residency.HOST, group
            self._count(track)
        self._price(track)
        if isinstance(move, Complete):  # its KV is not exact before a verification
            self._leaving.pop(track.rid, None)
        self._begin(track)

    def _to_plain(self, track: ScheduledRequest) -> None:
        self._end(track)
        track.split = False
        track.drafts, track.pending, track.closed, track.most = 0, 0, False, -1
        track.put_off(self.now)
        # A later retry starts from the prior: acceptance changes along a text.
        track.acceptance = Acceptance(self.estimates.prior)
        self.disabled_speculations += 1
        self._whole[track.rid] = track

    def _out_of_date(self, track: ScheduledRequest) -> bool:
        """Return whether the draft length has to be chosen again."""
        return (
            self.now - track.priced_at >= PRICE_EVERY
            or abs(track.acceptance.p - track.priced_p)
            >= PRICE_STEP * (1.0 - track.priced_p) + LEAST_STEP
        )

    def _price(self, track: ScheduledRequest) -> None:
        """Choose the draft length of the next cycles, or to stop drafting."""
        pays = self.policy.drafting_pays(track, self._link_load_s(), LEAVE)
        if pays:
            self._leaving.pop(track.rid, None)
        else:
            self._leaving[track.rid] = track
        track.priced_at, track.priced_p = self.now, track.acceptance.p

    def _end_cycle(self, track: ScheduledRequest) -> None:
        """End a cycle whose verification was planned; frees what it held."""
        self.pacing.end(track)
        self._emit(track, track.drafts + track.pending + 1)
        track.drafts, track.pending = 0, 0
        track.closed, track.failures, track.waited = False, 0, 0
        self._verified[track.rid] = track

    def _drafted(self, track: ScheduledRequest, result: RowResult) -> None:
        """Count what a draft row drafted; end the drafts where no more are wanted.

        Drafts after one that would end the request are useless: its verification comes
        as early as possible. Proposals may have reached the draft length before the
        verification is due: it comes earlier unless its prefetch is under way. Without
        drafts the cycle of the row has ended already.
        """
        if result.proposed:
            self._observe_proposals(track, result.proposed, result.drafted - 1)
        if not track.drafts:
            return
        track.pending -= result.proposed
        track.drafts += result.drafted - 1
        if result.ended:
            track.closed = True
            track.most = track.drafts
            self.pacing.expedite(track)
        elif track.staging_done and track.drafts >= track.wanted(
            self.settings.draft_length
        ):
            self.pacing.expedite(track)

    def _emit(self, track: ScheduledRequest, tokens: int) -> None:
        track.remaining -= tokens
        track.emitted_at = self.now

    def _next_cycle(self, track: ScheduledRequest) -> None:
        """Begin a cycle; its draft length depends on the results reported so far."""
        if track.remaining <= 0:
            return
        if self._out_of_date(track):
            self._price(track)
            if track.rid not in self._leaving:
                track.patience.reset()
        self._begin(track)

    def _begin(self, track: ScheduledRequest) -> None:
        if track.remaining <= 0:
            return
        self.pacing.begin(track)
        track.most = self.pacing.limit(track)
        if track.closed or track.most == 0:
            self.pacing.expedite(track)

    def _end(self, track: ScheduledRequest) -> None:
        self.pacing.end(track)
        self._leaving.pop(track.rid, None)
        self._verified.pop(track.rid, None)
        track.most, track.share = -1, None
        track.priced_at = self.now - PRICE_EVERY

    def _count(self, track: ScheduledRequest) -> None:
        """Count a residual KV on the host once for all requests that share it."""
        key = track.group or track.rid
        users = self._host_slots.setdefault(key, [0, track.spec.carried])
        users[0] += 1
        if users[0] == 1:
            self._link_slots += users[1]

    def _uncount(self, track: ScheduledRequest) -> None:
        key = track.group or track.rid
        users = self._host_slots.get(key)
        if users is None or track.residency is Residency.DEVICE:
            return
        users[0] -= 1
        if not users[0]:
            del self._host_slots[key]
            self._link_slots -= users[1]

    def _link_load_s(self) -> float:
        """Return the link time to prefetch all residual KV on the host, in seconds."""
        size = self._link_slots * self.settings.token_bytes
        return self.estimates.link.seconds(
            int(size * self.settings.transfer_fraction), "in"
        )


def _waits(track: ScheduledRequest | None) -> TypeGuard[ScheduledRequest]:
    """Return whether a request's residual KV is still expected from the store."""
    return track is not None and track.residency is Residency.STORE


def _pacing(
    settings: RuntimeSettings, throughput: Throughput, estimates: Estimates
) -> Pacing:
    if settings.pacing == "staggered":
        return Staggered(settings, throughput, estimates)
    at_once = 1 if settings.pacing == "sequential" else settings.max_verifies
    return LockStep(settings, at_once)
