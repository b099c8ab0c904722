"""Cross-resource staggering: the paper's section 5.2 over three rings.

Every draft-verify cycle reserves scheduler iterations by Algorithm 1. Its prefetch
starts in the first of them and its verification runs after the last one. If the
prefetch misses its deadline, the request drafts on up to the graph's width and then
waits; the batch continues.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import TYPE_CHECKING

from vericache_sglang.scheduling.admit import Admission
from vericache_sglang.scheduling.pacing import PacingStep, StagedRoom
from vericache_sglang.scheduling.plan import Residency
from vericache_sglang.scheduling.reservation import (
    LINK,
    STAGING,
    VERIFY,
    Demand,
    PrefetchDemand,
    Reservation,
    prefetch_of,
)
from vericache_sglang.scheduling.ring import WINDOW, Ring

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.scheduling.estimates import Estimates
    from vericache_sglang.scheduling.scheduled_request import ScheduledRequest
    from vericache_sglang.scheduling.settings import RuntimeSettings
    from vericache_sglang.scheduling.throughput import Throughput

VERIFY_ROW = (Demand(VERIFY, 1),)

ON_DEVICE = PrefetchDemand(1, (), VERIFY_ROW)
"""Demands of a cycle whose residual KV is on the device."""

STALE = 0.02
"""Relative change of link over iteration time that renews a prefetch's demands."""


class Staggered:
    """See ``Pacing``.

    Args:
        settings: Horizon, staging buffer, graph width.
        throughput: Predicts the cost of prefetches.
        estimates: Measured iteration time.
    """

    def __init__(
        self, settings: RuntimeSettings, throughput: Throughput, estimates: Estimates
    ) -> None:
        self._settings = settings
        self._throughput = throughput
        self._estimates = estimates
        # A prefetch and a full draft length must both fit the horizon.
        self.windows = max(settings.horizon, 2 * settings.draft_length + 4)
        self._rings = {
            LINK: Ring(self.windows, WINDOW),
            STAGING: Ring(self.windows, settings.staging_slots),
            VERIFY: Ring(self.windows, settings.max_verifies),
        }
        self.admission = Admission(self._rings, self.windows)
        self.room = StagedRoom(settings)
        self.deadline_misses = 0
        self._queue: deque[ScheduledRequest] = deque()
        self._starts: dict[int, list[ScheduledRequest]] = {}
        self._dues: dict[int, list[ScheduledRequest]] = {}
        self._late: deque[ScheduledRequest] = deque()
        self._overdue: dict[str, ScheduledRequest] = {}
        self._sharers: dict[str, dict[str, None]] = {}

    def begin(self, track: ScheduledRequest) -> None:
        """See ``Pacing.begin``."""
        self._queue.append(track)

    def expedite(self, track: ScheduledRequest) -> None:
        """See ``Pacing.expedite``."""
        if track.staging_done:
            self._overdue[track.rid] = track
        elif not track.staged and self._cancel(track):
            self._queue.appendleft(track)

    def end(self, track: ScheduledRequest) -> None:
        """See ``Pacing.end``."""
        self._cancel(track)
        self._overdue.pop(track.rid, None)
        self.room.give(track)
        for waiting in (self._queue, self._late):
            if track in waiting:
                waiting.remove(track)

    def limit(self, track: ScheduledRequest) -> int:
        """See ``Pacing.limit``: the graph's width, up to which late requests draft."""
        return track.cap(self._settings.draft_length)

    def step(self, now: int) -> PacingStep:
        """See ``Pacing.step``."""
        # The rings are still one iteration behind: an offset of d covers the drafts of
        # iterations now .. now + d - 1, and the verification in now + d.
        while self._queue and self._admit(self._queue[0]):
            self._queue.popleft()
        self.admission.slide()
        step = PacingStep()
        for track in self._starts.pop(now, ()):
            on_host = track.residency is Residency.HOST
            if on_host and self._starts_at(track) == now:
                self._start_late(track)
        while self._late and self.room.take(self._late[0]):
            step.stage_ins.append(self._late.popleft())
        for track in self._dues.pop(now, ()):
            reservation = self.admission.reservation(track.rid)
            if reservation is not None and reservation.deadline + 1 == now:
                self._overdue[track.rid] = track
        step.verifies = self._choose()
        return step

    def report(self) -> dict[str, int | float]:
        """See ``Pacing.report``."""
        # The current iteration has begun; reservations start with the next one.
        now = self._rings[LINK].now
        windows = range(now + 1, now + self.windows)
        shares = {
            f"ring_{name}_reserved": sum(map(ring.used, windows))
            / (max(ring.limit, 1) * self.windows)
            for name, ring in self._rings.items()
        }
        return {
            "ring_iterations": self.windows,
            **shares,
            "staging_held_slots": self.room.held,
            "unplaced_cycles": len(self._queue),
            "deadline_misses": self.deadline_misses,
        }

    def rings(self) -> Mapping[str, Ring]:
        """See ``Pacing.rings``."""
        return self._rings

    def _starts_at(self, track: ScheduledRequest) -> int:
        reservation = self.admission.reservation(track.rid)
        return -1 if reservation is None else reservation.first

    def _start_late(self, track: ScheduledRequest) -> None:
        if not track.staged and track not in self._late:
            self._late.append(track)

    def _admit(self, track: ScheduledRequest) -> bool:
        """Reserve a cycle; False leaves it at the head of the queue."""
        drafts = track.wanted(self._settings.draft_length)
        anchor = max(1, ceil(drafts / track.proposals.pace))
        reservation = self._follow(track, anchor)
        if reservation is None:
            prefetch = self._prefetch(track)
            reservation = self.admission.admit(track.rid, prefetch, anchor)
        if reservation is None:
            return False
        self._sharers.setdefault(self.room.key(track), {})[track.rid] = None
        self._dues.setdefault(reservation.deadline + 1, []).append(track)
        if track.residency is Residency.HOST:
            # A shared prefetch may have started in an earlier iteration.
            first = max(reservation.first, self._rings[LINK].now + 1)
            if first > reservation.first:
                self._start_late(track)
            else:
                self._starts.setdefault(first, []).append(track)
        return True

    def _follow(self, track: ScheduledRequest, anchor: int) -> Reservation | None:
        """Share the prefetch of the same residual KV, if its deadline is late enough.

        Verifying few drafts costs more than a second prefetch: the deadline must allow
        half of the wanted drafts.
        """
        sharers = self._sharers.get(self.room.key(track))
        if not sharers or track.residency is not Residency.HOST:
            return None
        lowest = (anchor + 1) // 2
        return self.admission.share(
            track.rid, next(iter(sharers)), VERIFY_ROW, lowest=lowest
        )

    def _prefetch(self, track: ScheduledRequest) -> PrefetchDemand:
        """Return a cycle's demands on the rings (l_r and S_r of the paper)."""
        size = self._throughput.prefetch_bytes(track)
        if track.residency is not Residency.HOST or not size:
            return ON_DEVICE
        iteration_s = self._estimates.iteration.iteration_s.value
        seconds = self._throughput.prefetch_s(track)
        known = track.prefetch
        if known is not None:
            ratio = known[0] / iteration_s * seconds / known[1]
            if abs(ratio - 1.0) <= STALE:
                return known[2]
        prefetch = prefetch_of(
            bytes_=size,
            link_bytes_per_s=size / seconds,
            # A prefetch longer than the horizon reserves all of it, and will be late.
            iteration_s=max(iteration_s, seconds / (self.windows - 3)),
            slots=track.spec.staged,
        )
        track.prefetch = (iteration_s, seconds, prefetch)
        return prefetch

    def _choose(self) -> list[ScheduledRequest]:
        """Choose this iteration's verifications; the others miss their deadline."""
        ready = [track for track in self._overdue.values() if track.staging_done]
        # Longest wait first avoids starvation; the stable sort keeps ties in order.
        ready.sort(key=lambda track: -track.waited)
        chosen = ready[: self._settings.max_verifies]
        for track in chosen:
            del self._overdue[track.rid]
        self.deadline_misses += len(self._overdue)
        return chosen

    def _cancel(self, track: ScheduledRequest) -> bool:
        if self.admission.cancel(track.rid) is None:
            return False
        key = self.room.key(track)
        self._sharers[key].pop(track.rid)
        if not self._sharers[key]:
            del self._sharers[key]
        return True
