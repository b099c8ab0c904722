"""Random histories of an Admission against Algorithm 1 written literally.

Reloads without work are the printed rule; those with it fill the link window by window.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.admit import Admission
from vericache_sglang.scheduling.reservation import Demand, PrefetchDemand
from vericache_sglang.scheduling.ring import Ring

W = 10
LIMITS = {"link": 10, "staging": 8, "verify": 2}


def levels(rings):
    return {
        name: [ring.used(ring.now + i) for i in range(W)]
        for name, ring in rings.items()
    }


class Recount:
    """What should be booked, recounted from the list of loads at every step."""

    def __init__(self):
        self.now = 0
        self.loads = []

    def used(self):
        totals = {name: Counter() for name in LIMITS}
        for load in self.loads:
            until = max(reader["deadline"] for reader in load["readers"].values())
            for each in load["prefetch"].demands:
                end = until + each.extra if each.extra else load["deadline"]
                for window in range(load["first"], end + 1):
                    totals[each.ring][window] += each.amount
            for window, amount in load["worked"].items():
                totals["link"][window] += amount
            for reader in load["readers"].values():
                for each in reader["point"]:
                    totals[each.ring][reader["deadline"] + 1] += each.amount
        return totals

    def takes(self, windows_of):
        """Say whether every (ring, window, amount) is in the horizon and free."""
        used = self.used()
        return all(
            self.now <= window < self.now + W
            and used[ring][window] + amount <= LIMITS[ring]
            for ring, window, amount in windows_of
        )

    def algorithm_1(self, prefetch, anchor, lowest, highest):
        """Return first and last offset that Algorithm 1 picks, by trying all."""
        top = W - 1 if highest is None else min(W - 1, highest)
        offsets = range(max(prefetch.span, lowest), top + 1)
        for d in sorted(offsets, key=lambda d: (abs(d - anchor), d)):
            for first in self.firsts(prefetch, d):
                span = [
                    (each.ring, self.now + i, each.amount)
                    for each in prefetch.demands
                    for i in range(first, d + each.extra + 1)
                ]
                point = [
                    (each.ring, self.now + d + 1, each.amount)
                    for each in prefetch.point
                ]
                if (
                    self.takes(span + point)
                    and self.work(prefetch, first, d) is not None
                ):
                    return first, d
        return None

    def firsts(self, prefetch, d):
        """Return where a reload that ends in d may start, the best first."""
        short = d - prefetch.span + 1
        if prefetch.work is None:
            return [short]
        long = short - 1
        if long < 1:
            return [short]
        # One window sooner only if that takes something and the last one is needed.
        left = LIMITS["link"] - self.used()["link"][self.now + long]
        needed = self.work(prefetch, long, d - 1) is None
        return [long, short] if left and needed else [short, long]

    def work(self, prefetch, first, last):
        """Return the work taken of each absolute window; None if not all of it fits."""
        if prefetch.work is None:
            return {}
        used, left, taken = self.used()["link"], prefetch.work.amount, {}
        for window in range(self.now + first, self.now + last + 1):
            taken[window] = min(left, LIMITS["link"] - used[window])
            left -= taken[window]
        return None if left else taken

    def shared_window(self, load, point, lowest):
        """Return the first window a sharer may take, by trying every one."""
        until = max(reader["deadline"] for reader in load["readers"].values())
        held = [each for each in load["prefetch"].demands if each.extra]
        if not held or any(until + each.extra < self.now for each in held):
            return None
        for deadline in range(load["deadline"], self.now + W):
            more = [
                (each.ring, window, each.amount)
                for each in held
                for window in range(until + each.extra + 1, deadline + each.extra + 1)
            ]
            rows = [(each.ring, deadline + 1, each.amount) for each in point]
            if deadline - self.now >= lowest and self.takes(more + rows):
                return deadline
        return None

    def load_of(self, rid):
        return next((load for load in self.loads if rid in load["readers"]), None)

    def drop(self, rid):
        load = self.load_of(rid)
        if load:
            del load["readers"][rid]
            self.loads = [load for load in self.loads if load["readers"]]


RIDS = st.sampled_from("abcde")
PRINTED = st.builds(
    lambda span, link, slots, extra, rows: PrefetchDemand(
        span,
        (Demand("link", link), Demand("staging", slots, extra)),
        (Demand("verify", rows),),
    ),
    span=st.integers(1, 4),
    link=st.integers(0, 10),
    slots=st.integers(0, 6),
    extra=st.integers(0, 2),
    rows=st.integers(0, 2),
)
WORKED = st.builds(
    lambda work, slots, extra, rows: PrefetchDemand(
        max(1, -(-work // LIMITS["link"])),
        (Demand("staging", slots, extra),),
        (Demand("verify", rows),),
        Demand("link", work),
    ),
    work=st.integers(0, 40),
    slots=st.integers(0, 6),
    extra=st.integers(0, 2),
    rows=st.integers(0, 2),
)
PREFETCHES = PRINTED | WORKED
STEPS = st.one_of(
    st.tuples(
        st.just("admit"),
        RIDS,
        PREFETCHES,
        st.integers(0, 12),
        st.integers(0, 4),
        st.none() | st.integers(1, 9),
    ),
    st.tuples(st.just("share"), RIDS, RIDS, st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("cancel"), RIDS),
    st.tuples(st.just("slide")),
)


def admit_step(admission, oracle, rid, wanted, *search):
    anchor, lowest, highest = search
    if oracle.load_of(rid):
        with pytest.raises(InvariantError):
            admission.admit(rid, wanted, anchor)
        return
    expected = oracle.algorithm_1(wanted, anchor, lowest, highest)
    made = admission.admit(rid, wanted, anchor, lowest=lowest, highest=highest)
    found = made and (made.first - oracle.now, made.deadline - oracle.now)
    assert found == expected
    if made:
        reader = {"deadline": made.deadline, "point": wanted.point}
        oracle.loads.append(
            {
                "first": made.first,
                "worked": oracle.work(wanted, *expected),
                "deadline": made.deadline,
                "prefetch": wanted,
                "readers": {rid: reader},
            }
        )


def share_step(admission, oracle, rid, leader, rows, lowest):
    load = oracle.load_of(leader)
    if oracle.load_of(rid):
        return
    point = (Demand("verify", rows),)
    expected = oracle.shared_window(load, point, lowest) if load else None
    made = admission.share(rid, leader, point, lowest=lowest)
    assert (made and made.deadline) == expected
    if made:
        assert made.leader == next(iter(load["readers"]))
        load["readers"][rid] = {"deadline": made.deadline, "point": point}


def follow(steps):
    """Run the steps, compared with the recount; return what the rings hold at each."""
    rings = {name: Ring(W, limit) for name, limit in LIMITS.items()}
    admission, oracle, trace = Admission(rings, W), Recount(), []
    for kind, *rest in steps:
        if kind == "admit":
            admit_step(admission, oracle, *rest)
        elif kind == "share":
            share_step(admission, oracle, *rest)
        elif kind == "cancel":
            known = oracle.load_of(*rest)
            assert (admission.cancel(*rest) is None) is (known is None)
            oracle.drop(*rest)
        else:
            admission.slide()
            oracle.now += 1
        used = oracle.used()
        for name, ring in rings.items():
            booked = [used[name][oracle.now + i] for i in range(W)]
            held = levels(rings)[name]
            # The current window has begun: what was cancelled of it may stay.
            assert held[1:] == booked[1:]
            assert booked[0] <= held[0] <= ring.limit
            assert max(booked) <= ring.limit
        trace.append([levels(rings), [admission.reservation(rid) for rid in "abcde"]])
    for rid in "abcde":
        admission.cancel(rid)
    admission.slide()
    assert not any(map(any, levels(rings).values()))
    return trace


@settings(max_examples=250, deadline=None)
@given(st.lists(STEPS, min_size=5, max_size=40))
def test_every_history_is_algorithm_1_and_adds_up(steps):
    assert follow(steps) == follow(steps), "equal calls give equal reservations"
