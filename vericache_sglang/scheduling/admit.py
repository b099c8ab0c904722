"""Admission: reserves capacity for each request's next prefetch and verification.

Algorithm 1 of VeriCache (arXiv:2605.17613, section 5), over any number of rings. A
window is one scheduler iteration of a ring. Link time is reserved differently from the
printed algorithm, see ``prefetch_of``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.reservation import Reservation, RingLoad

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vericache_sglang.scheduling.reservation import Demand, PrefetchDemand
    from vericache_sglang.scheduling.ring import Ring


def first_candidate(feasible: int, anchor: int) -> int | None:
    """Return the first of anchor, anchor - 1, anchor + 1, anchor - 2, ... that is set.

    Args:
        feasible: Bit set of the values to choose from.
        anchor: Preferred value, >= 0.
    """
    if not feasible:
        return None
    # The nearest value on either side is a bit position: no loop is needed.
    below = (feasible & ((2 << anchor) - 1)).bit_length() - 1
    higher = feasible >> (anchor + 1)
    above = anchor + (higher & -higher).bit_length()
    if below < 0 or (higher and above - anchor < anchor - below):
        return above
    return below


class Admission:
    """Algorithm 1 over named rings; at most one reservation per request.

    Deterministic: ranks that make equal calls reach equal reservations.

    Args:
        rings: Every ring by name; only this class advances them.
        windows: W, in scheduler iterations, the same for every ring.

    Raises:
        InvariantError: The rings differ in W or in the current iteration.
    """

    def __init__(self, rings: Mapping[str, Ring], windows: int) -> None:
        if any(ring.windows != windows for ring in rings.values()):
            raise InvariantError(f"not every ring has {windows} windows")
        if len({ring.now for ring in rings.values()}) > 1:
            raise InvariantError("the rings are not in the same window")
        self._rings = dict(rings)
        self._windows = windows
        self._reservations: dict[str, Reservation] = {}
        self._loads: dict[str, RingLoad] = {}
        self.now = next((ring.now for ring in rings.values()), 0)

    def admit(
        self,
        rid: str,
        prefetch: PrefetchDemand,
        anchor: int,
        *,
        lowest: int = 1,
        highest: int | None = None,
    ) -> Reservation | None:
        """Reserve the first candidate deadline at which every ring has capacity.

        A deadline d is an offset: the request drafts in iterations ``now + 1`` to
        ``now + d``, the prefetch starts after ``now`` and ends in ``now + d``, and the
        verification runs in ``now + d + 1``. O(W) per ring.

        Args:
            rid: Request id.
            prefetch: Capacity that the prefetch and the verification take.
            anchor: Preferred d, in iterations (the paper's draft length x).
            lowest: Smallest d, in iterations; raised to S_r.
            highest: Largest d, in iterations; limited by the horizon. None: no other
                limit.

        Returns:
            The reservation, or None when no candidate has capacity.

        Raises:
            InvariantError: The request already has a reservation, or a ring is unknown.
        """
        self._check(rid, prefetch)
        latest = self._windows - 1
        if highest is not None:
            latest = min(latest, highest)
        lowest = max(lowest, prefetch.span)
        if lowest > latest:
            return None
        within = (2 << latest) - (1 << lowest)
        anchor = min(max(anchor, lowest), latest)
        first = self._first_at(prefetch, anchor)
        if first is not None:  # the common case; otherwise search every iteration
            return self._book(rid, prefetch, first, self.now + anchor)
        short, long = self._ends(prefetch)
        if prefetch.work is not None and long:
            link = self._rings[prefetch.work.ring]
            either = short | long & link.covers(prefetch.work.amount, prefetch.span + 1)
        else:
            either = short
        offset = first_candidate(either & within, anchor)
        if offset is None:
            return None
        deadline = self.now + offset
        first = deadline - prefetch.span + 1
        if not short >> offset & 1 or (
            long >> offset & 1 and self._fills(prefetch, first - 1)
        ):
            first -= 1
        return self._book(rid, prefetch, first, deadline)

    def share(
        self,
        rid: str,
        leader: str,
        point: tuple[Demand, ...],
        *,
        lowest: int = 0,
        highest: int | None = None,
    ) -> Reservation | None:
        """Reserve a verification over residual KV that another request prefetches.

        Uses the transfer's deadline or the first later iteration with capacity for
        ``point``, and no link time. The KV in the staging buffer is held until then.

        Args:
            rid: Request id.
            leader: Request with a reservation, either its own or a shared one.
            point: Capacity that the verification takes in its iteration.
            lowest: Smallest deadline, in iterations from now, >= 0.
            highest: Largest deadline, in iterations from now; None: the horizon.

        Returns:
            The reservation, which names ``leader``; None when the leader has none, when
            the residual KV is freed before ``lowest``, or when no iteration has
            capacity.

        Raises:
            InvariantError: The request already has a reservation, a ring is unknown, or
                ``point`` names a ring of the leader's transfer.
        """
        load = self._loads.get(leader)
        if load is None:
            return None
        prefetch = replace(self._reservations[leader].prefetch, point=point)
        self._check(rid, prefetch)
        held = load.held()
        furthest = load.furthest()
        # Nothing holds the residual KV in the current iteration: it has been freed.
        if not held or furthest + min(each.extra for each in held) < self.now:
            return None
        beyond = max(each.extra for each in held)
        latest = self.now + self._windows - 1 - beyond
        if highest is not None:
            latest = min(latest, self.now + highest)
        earliest = max(load.deadline, self.now + max(0, lowest))
        for deadline in range(load.deadline, latest + 1):
            if deadline > furthest and not self._fit_at(held, deadline):
                return None
            if deadline >= earliest and self._fit_at(point, deadline, 1):
                return self._join(rid, load, prefetch, deadline)
        return None

    def cancel(self, rid: str) -> Reservation | None:
        """Release the future part of a request's reservation.

        A transfer that others share stays reserved; the oldest of them becomes its
        leader.

        Returns:
            The released reservation, or None if there was none.
        """
        reservation = self._reservations.pop(rid, None)
        if reservation is None:
            return None
        load = self._loads.pop(rid)
        furthest = load.furthest()
        del load.readers[rid]
        if self._begun(load, furthest):
            if reservation.leader is None:
                self._choose_leader(load)
            return reservation
        verify = reservation.deadline + 1
        for each in reservation.prefetch.point:
            self._rings[each.ring].release(verify, verify, each.amount)
        for each in load.prefetch.demands:
            start = load.first
            if load.readers:
                start = load.end(each, load.furthest()) + 1
            end = load.end(each, furthest)
            self._rings[each.ring].release(start, end, each.amount)
        work = load.prefetch.work
        if work is not None and not load.readers:
            self._rings[work.ring].take_back(load.first, load.worked)
        if reservation.leader is None:
            self._choose_leader(load)
        return reservation

    def slide(self) -> None:
        """Advance all rings by one iteration; reservations stay until cancelled."""
        for ring in self._rings.values():
            ring.slide()
        self.now += 1

    def reservation(self, rid: str) -> Reservation | None:
        """Return the request's reservation, past or future; None if it has none."""
        return self._reservations.get(rid)

    @property
    def requests(self) -> Collection[str]:
        """The requests that have one."""
        return self._reservations.keys()

    def _check(self, rid: str, prefetch: PrefetchDemand) -> None:
        if rid in self._reservations:
            raise InvariantError(f"{rid} is admitted twice")
        for name in prefetch.rings():
            if name not in self._rings:
                raise InvariantError(
                    f"unknown ring {name!r}; known: {', '.join(self._rings)}"
                )

    def _begun(self, load: RingLoad, furthest: int) -> bool:
        """Return whether all iterations of a reservation have begun.

        Those are never reserved again, so nothing has to be released.
        """
        extras = [each.extra for each in load.prefetch.demands]
        return furthest + max(1, *extras, 1) <= self.now

    def _first_at(self, prefetch: PrefetchDemand, offset: int) -> int | None:
        """Return the first iteration of a ``span``-long prefetch for one deadline.

        One iteration earlier if ``_fills`` returns true; None without capacity.
        """
        deadline = self.now + offset
        first = deadline - prefetch.span + 1
        if not self._fit_at(prefetch.point, deadline, 1):
            return None
        rings, work = self._rings, prefetch.work
        for each in prefetch.demands:
            if not rings[each.ring].fits(first, deadline + each.extra, each.amount):
                return None
        if work is None:
            return first
        if sum(rings[work.ring].room(first, deadline)) < work.amount:
            return None
        earlier = first - 1
        if (
            earlier > self.now
            and all(
                rings[each.ring].fits(earlier, earlier, each.amount)
                for each in prefetch.demands
            )
            and self._fills(prefetch, earlier)
        ):
            return earlier
        return first

    def _ends(self, prefetch: PrefetchDemand) -> tuple[int, int]:
        """Find the deadlines for which a prefetch has capacity.

        Returns:
            Two bit sets, bit d for the deadline d: all demands fit over ``span``
            iterations; all demands but the work fit over one more. Iterations beyond
            the horizon have no bit: a deadline that needs one of them is excluded.
        """
        rings, work, span = self._rings, prefetch.work, prefetch.span
        verified = held = (1 << self._windows) - 1
        for each in prefetch.point:
            verified &= rings[each.ring].ends(each.amount, 1) >> 1
        longer = held
        for each in prefetch.demands:
            ends = rings[each.ring].ends(each.amount, span + each.extra)
            held &= ends >> each.extra
            # One more iteration fits if the spans ending here and one before both fit.
            longer &= (ends & ends << 1) >> each.extra
        # The current iteration has begun: reservations start with the next one.
        short = verified & held & -(1 << span)
        if work is None or not short:
            return short, 0
        covered = rings[work.ring].covers(work.amount, span)
        return short & covered, verified & longer & -(2 << span)

    def _fills(self, prefetch: PrefetchDemand, first: int) -> bool:
        """Return whether to start in ``first`` and use the link time left free there.

        False if none is free, and if the prefetch would then end one iteration before
        its deadline: it would occupy the staging buffer longer and save no link time.
        """
        if prefetch.work is None:
            return False
        room = self._rings[prefetch.work.ring].room(first, first + prefetch.span - 1)
        return room[0] > 0 and sum(room) < prefetch.work.amount

    def _fit_at(
        self, demands: Sequence[Demand], deadline: int, after: int | None = None
    ) -> bool:
        """Return whether each demand fits ``after`` (or ``extra``) iterations later."""
        for each in demands:
            window = deadline + (each.extra if after is None else after)
            if not self._rings[each.ring].fits(window, window, each.amount):
                return False
        return True

    def _book(
        self, rid: str, prefetch: PrefetchDemand, first: int, deadline: int
    ) -> Reservation:
        load = RingLoad(first, deadline, prefetch)
        for each in prefetch.demands:
            self._rings[each.ring].reserve(first, deadline + each.extra, each.amount)
        if prefetch.work is not None:
            link = self._rings[prefetch.work.ring]
            load.worked = link.fill(first, deadline, prefetch.work.amount)
        return self._enter(Reservation(rid, first, deadline, prefetch), load)

    def _join(
        self, rid: str, load: RingLoad, prefetch: PrefetchDemand, deadline: int
    ) -> Reservation:
        furthest = load.furthest()
        for each in load.held():
            start, end = furthest + each.extra + 1, deadline + each.extra
            self._rings[each.ring].reserve(start, end, each.amount)
        leader = next(iter(load.readers))
        return self._enter(
            Reservation(rid, load.first, deadline, prefetch, leader), load
        )

    def _enter(self, reservation: Reservation, load: RingLoad) -> Reservation:
        verify = reservation.deadline + 1
        for each in reservation.prefetch.point:
            self._rings[each.ring].reserve(verify, verify, each.amount)
        load.readers[reservation.rid] = reservation.deadline
        self._reservations[reservation.rid] = reservation
        self._loads[reservation.rid] = load
        return reservation

    def _choose_leader(self, load: RingLoad) -> None:
        leader = next(iter(load.readers), None)
        for rid in load.readers:
            self._reservations[rid] = replace(
                self._reservations[rid], leader=None if rid == leader else leader
            )
