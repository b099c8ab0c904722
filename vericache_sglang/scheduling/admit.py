"""Admit: finds each request's next verification a window that every ring has room in.

Algorithm 1 of VeriCache (arXiv:2605.17613, section 5), over any number of rings; how it
books link time differs from the printed one, see ``prefetch_of``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.reservation import Reservation, RingLoad

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    # The nearest on either side are a bit's position each: no need to try one by one.
    below = (feasible & ((2 << anchor) - 1)).bit_length() - 1
    higher = feasible >> (anchor + 1)
    above = anchor + (higher & -higher).bit_length()
    if below < 0 or (higher and above - anchor < anchor - below):
        return above
    return below


class Admission:
    """Algorithm 1 over named rings; at most one reservation per request.

    Depends on its calls only, so ranks that make equal calls reach equal reservations.

    Args:
        rings: Every ring by name; they are slid here, and nowhere else.
        windows: W, the same for every ring.

    Raises:
        InvariantError: A ring has another W, or another current window.
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
        """Reserve the first candidate deadline that every ring has room for.

        A deadline d is an offset: windows ``now + 1`` to ``now + d`` draft, the reload
        ends in ``now + d`` and starts after ``now``, the verification runs in
        ``now + d + 1``. O(W) per ring.

        Args:
            rid: Request id.
            prefetch: What the verification needs.
            anchor: Preferred d, in windows (the paper's draft length x).
            lowest: Smallest d, in windows; S_r where that is more.
            highest: Largest d, in windows; as far as the horizon goes where that is
                less, or when None.

        Returns:
            The reservation, or None when no candidate has room.

        Raises:
            InvariantError: The request has a reservation, or a ring is unknown.
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
        if first is not None:  # most get it; the rest asks about every window
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
        """Let a request be verified over the complement that another one stages.

        Takes the transfer's deadline or the first later window with room for
        ``point``; no link time. The rings that hold KV go on holding it up to there.

        Args:
            rid: Request id.
            leader: Request with a reservation, its own or a shared one.
            point: What this request's verification takes in its window.
            lowest: Smallest deadline, in windows from now, >= 0.
            highest: Largest deadline, in windows from now; None for the horizon.

        Returns:
            The reservation, with ``leader`` named; None when the leader has none, when
            the complement is given back before ``lowest``, or when no window has room.

        Raises:
            InvariantError: The request has a reservation, a ring is unknown, or
                ``point`` names a ring of the leader's transfer.
        """
        load = self._loads.get(leader)
        if load is None:
            return None
        prefetch = replace(self._reservations[leader].prefetch, point=point)
        self._check(rid, prefetch)
        held = load.held()
        furthest = load.furthest()
        # Nothing holds the complement in the current window: it was given back.
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
        """Give back what is still ahead of a request's reservation.

        A transfer that others read stays booked, and the oldest of them leads it then.

        Returns:
            The reservation it had, or None.
        """
        reservation = self._reservations.pop(rid, None)
        if reservation is None:
            return None
        load = self._loads.pop(rid)
        furthest = load.furthest()
        del load.readers[rid]
        if self._begun(load, furthest):
            if reservation.leader is None:
                self._hand_over(load)
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
            self._hand_over(load)
        return reservation

    def slide(self) -> None:
        """Advance every ring by one window; past reservations stay until cancelled."""
        for ring in self._rings.values():
            ring.slide()
        self.now += 1

    def reservation(self, rid: str) -> Reservation | None:
        """Return the request's reservation, past or ahead; None when it has none."""
        return self._reservations.get(rid)

    def _check(self, rid: str, prefetch: PrefetchDemand) -> None:
        if rid in self._reservations:
            raise InvariantError(f"{rid} is admitted twice")
        for name in prefetch.rings():
            if name not in self._rings:
                raise InvariantError(
                    f"unknown ring {name!r}; known: {', '.join(self._rings)}"
                )

    def _begun(self, load: RingLoad, furthest: int) -> bool:
        """Say whether all that a reservation took is in windows that have begun.

        Nobody can ask for those any more, so nothing has to be given back.
        """
        extras = [each.extra for each in load.prefetch.demands]
        return furthest + max(1, *extras, 1) <= self.now

    def _first_at(self, prefetch: PrefetchDemand, offset: int) -> int | None:
        """Return where a reload of ``span`` windows would start for one deadline.

        A window earlier where ``_fills`` says so; None without room.
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
        """Find the deadlines at which a reload has room.

        Returns:
            Two bit sets, bit d for the deadline d: everything has room over ``span``
            windows; all but the work has room over one more. What lies beyond the
            horizon has no bit, so a verification or a hold out there rules its
            deadline out.
        """
        rings, work, span = self._rings, prefetch.work, prefetch.span
        verified = held = (1 << self._windows) - 1
        for each in prefetch.point:
            verified &= rings[each.ring].ends(each.amount, 1) >> 1
        longer = held
        for each in prefetch.demands:
            ends = rings[each.ring].ends(each.amount, span + each.extra)
            held &= ends >> each.extra
            # Room in one window more: there is room up to this one and the one before.
            longer &= (ends & ends << 1) >> each.extra
        # The current window has begun: the first one to take is the next.
        short = verified & held & -(1 << span)
        if work is None or not short:
            return short, 0
        covered = rings[work.ring].covers(work.amount, span)
        return short & covered, verified & longer & -(2 << span)

    def _fills(self, prefetch: PrefetchDemand, first: int) -> bool:
        """Say whether starting in ``first`` uses up what a neighbour left of it.

        Not where nothing is left, and not where the reload would then be done a window
        before its deadline: it would hold its staging longer and save no link time.
        """
        if prefetch.work is None:
            return False
        room = self._rings[prefetch.work.ring].room(first, first + prefetch.span - 1)
        return room[0] > 0 and sum(room) < prefetch.work.amount

    def _fit_at(
        self, demands: Sequence[Demand], deadline: int, after: int | None = None
    ) -> bool:
        """Say whether each demand fits in the one window after the deadline."""
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

    def _hand_over(self, load: RingLoad) -> None:
        leader = next(iter(load.readers), None)
        for rid in load.readers:
            self._reservations[rid] = replace(
                self._reservations[rid], leader=None if rid == leader else leader
            )
