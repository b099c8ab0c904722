"""Admission by hand: small rings whose every window can be written down."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.admit import Admission, first_candidate
from vericache_sglang.scheduling.reservation import Demand, PrefetchDemand, prefetch_of
from vericache_sglang.scheduling.ring import WINDOW, Ring

W = 10
LIMITS = {"link": 10, "staging": 8, "verify": 2}


def fresh(windows=W):
    rings = {name: Ring(windows, limit) for name, limit in LIMITS.items()}
    return Admission(rings, windows), rings


def prefetch(span=2, link=6, slots=4, extra=1, rows=1):
    return PrefetchDemand(
        span=span,
        demands=(Demand("link", link), Demand("staging", slots, extra)),
        point=(Demand("verify", rows),),
    )


def worked(work, span=2, slots=1):
    return PrefetchDemand(
        span=span,
        demands=(Demand("staging", slots, 1),),
        point=(Demand("verify", 0),),
        work=Demand("link", work),
    )


def levels(rings):
    return {
        name: [ring.used(ring.now + i) for i in range(ring.windows)]
        for name, ring in rings.items()
    }


@pytest.mark.parametrize(
    ("anchor", "order"),
    [
        (3, [3, 2, 4, 1, 5, 0]),
        (0, [0, 1, 2, 3, 4, 5]),
        (5, [5, 4, 3, 2, 1, 0]),
        (9, [5, 4, 3, 2, 1, 0]),
    ],
    ids=["inside", "lowest", "highest", "above"],
)
def test_candidates_go_outwards_from_the_anchor(anchor, order):
    left, chosen = 0b111111, []
    while left:
        chosen.append(first_candidate(left, anchor))
        left ^= 1 << chosen[-1]
    assert chosen == order
    assert first_candidate(0, anchor) is None


# 1 MB/s for 2 ms: 2000 bytes a window.
SIZES = pytest.mark.parametrize(
    ("bytes_", "span", "total", "part"),
    [
        (0, 1, 0, 0),
        (1_000, 1, 500_000, 500_000),
        (2_000, 1, WINDOW, WINDOW),
        (2_001, 2, 1_000_500, 500_250),
        (6_001, 4, 3_000_500, 750_125),
    ],
    ids=["nothing", "half", "exactly-one", "just-over", "several"],
)


@SIZES
def test_a_prefetch_is_work_for_whole_windows(bytes_, span, total, part):
    made = prefetch_of(bytes_=bytes_, link_bytes_per_s=1e6, iteration_s=2e-3, slots=7)
    assert (made.span, made.work) == (span, Demand("link", total))
    assert made.demands == (Demand("staging", 7, 1),)
    assert made.point == (Demand("verify", 1),)


@SIZES
def test_the_printed_rule_takes_equal_parts(bytes_, span, total, part):
    made = prefetch_of(
        bytes_=bytes_, link_bytes_per_s=1e6, iteration_s=2e-3, slots=7, even=True
    )
    assert (made.span, made.work) == (span, None)
    assert made.demands == (Demand("link", part), Demand("staging", 7, 1))


@given(st.integers(0, 10**12), st.floats(1e6, 2e12), st.floats(1e-5, 10))
def test_a_prefetch_gets_its_link_time_and_no_window_more_than_there_is(size, rate, t):
    made = prefetch_of(bytes_=size, link_bytes_per_s=rate, iteration_s=t, slots=1)
    needed = size / (rate * t)
    assert made.work.amount <= WINDOW * made.span
    assert made.work.amount >= needed * WINDOW * (1 - 1e-12)
    assert abs(made.span - max(1, ceil(needed))) <= (needed % 1 < 1e-5)


@pytest.mark.parametrize(
    ("size", "rate", "t"),
    [(-1, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, -1.0), (1, float("nan"), 1.0)],
)
def test_a_prefetch_without_a_link_is_refused(size, rate, t):
    with pytest.raises(InvariantError, match="bytes/s"):
        prefetch_of(bytes_=size, link_bytes_per_s=rate, iteration_s=t, slots=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PrefetchDemand(0, ()),
        lambda: PrefetchDemand(1, (Demand("link", -1),)),
        lambda: PrefetchDemand(1, (Demand("staging", 1, -1),)),
        lambda: PrefetchDemand(1, (), (Demand("verify", 1, 1),)),
        lambda: PrefetchDemand(1, (Demand("link", 1), Demand("link", 1))),
        lambda: PrefetchDemand(1, (Demand("link", 1),), (Demand("link", 1),)),
        lambda: PrefetchDemand(1, (), (), Demand("link", -1)),
        lambda: PrefetchDemand(1, (), (), Demand("link", 1, 1)),
        lambda: PrefetchDemand(1, (Demand("link", 1),), (), Demand("link", 1)),
    ],
)
def test_a_malformed_prefetch_is_refused(make):
    with pytest.raises(InvariantError):
        make()


def test_an_empty_horizon_gives_the_anchor():
    admission, rings = fresh()
    made = admission.admit("a", prefetch(), anchor=5)
    assert (made.first, made.deadline, made.leader) == (4, 5, None)
    assert levels(rings) == {
        "link": [0, 0, 0, 0, 6, 6, 0, 0, 0, 0],
        "staging": [0, 0, 0, 0, 4, 4, 4, 0, 0, 0],
        "verify": [0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
    }


def test_work_fills_what_its_neighbours_leave():
    admission, rings = fresh()
    # 15 of 10 a window. "a" leaves half of 5, "b" takes it around "a"; "c" finds the
    # room for one end of its own on the early side, "d" on the late one.
    made = [admission.admit(rid, worked(15), 5) for rid in "abcd"]
    spans = [(each.first, each.deadline) for each in made]
    assert spans == [(4, 5), (3, 5), (1, 3), (6, 7)]
    assert levels(rings)["link"] == [0, 10, 5, 10, 10, 10, 10, 5, 0, 0]
    admission.cancel("b")
    assert levels(rings)["link"] == [0, 10, 5, 0, 10, 5, 10, 5, 0, 0]


def test_a_prefetch_starts_sooner_only_to_use_up_what_was_left():
    admission, rings = fresh()
    rings["link"].reserve(3, 3, 4)
    # 6 of window 3, 10 of 4, and the 2 that are left of 18 in 5.
    assert admission.admit("a", worked(18), 5).first == 3
    assert levels(rings)["link"][3:6] == [10, 10, 2]
    # Done by 4 if it took the 6 of window 3: it does not start sooner for that.
    admission, rings = fresh()
    rings["link"].reserve(3, 3, 4)
    assert admission.admit("a", worked(15), 5).first == 4


@pytest.mark.parametrize(
    ("link_taken", "first", "deadline"),
    [((3, 4), 4, 5), ((4, 5), 4, 6)],
    ids=["two-are-enough", "two-are-too-few"],
)
def test_a_prefetch_does_not_start_sooner_in_a_full_staging_region(
    link_taken, first, deadline
):
    admission, rings = fresh()
    window, amount = link_taken
    rings["link"].reserve(window, window, amount)
    rings["staging"].reserve(3, 3, LIMITS["staging"])
    made = admission.admit("a", worked(18), 5)
    assert (made.first, made.deadline) == (first, deadline)


def test_two_prefetches_of_a_window_and_a_half_take_three_windows():
    exact, printed = fresh()[0], fresh()[0]
    made = [exact.admit(rid, worked(15, slots=0), 2) for rid in "abcdef"]
    assert [each and each.deadline for each in made] == [2, 3, 5, 6, 8, None]
    # Equal parts of 8 leave 2 of every window idle: nobody shares one.
    made = [printed.admit(rid, prefetch(link=8, slots=0), 2) for rid in "abcde"]
    assert [each and each.deadline for each in made] == [2, 4, 6, 8, None]


def test_misuse_is_refused():
    admission, _ = fresh()
    admission.admit("a", prefetch(), 5)
    with pytest.raises(InvariantError, match="a is admitted twice"):
        admission.admit("a", prefetch(), 5)
    with pytest.raises(InvariantError, match="unknown ring 'disk'; known: link"):
        admission.admit("b", PrefetchDemand(1, (Demand("disk", 1),)), 5)
    with pytest.raises(InvariantError, match="unknown ring 'bus'"):
        admission.admit("b", PrefetchDemand(1, (), (), Demand("bus", 1)), 5)
    with pytest.raises(InvariantError, match="ring twice"):
        admission.share("b", "a", (Demand("link", 1),))
    with pytest.raises(InvariantError, match="every ring has 9 windows"):
        Admission({"link": Ring(8, 1)}, 9)
    late = Ring(8, 1)
    late.slide()
    with pytest.raises(InvariantError, match="same window"):
        Admission({"link": late, "staging": Ring(8, 1)}, 8)


ROW = (Demand("verify", 1),)


def test_a_full_staging_region_stops_a_sharer():
    admission, rings = fresh()
    admission.admit("a", prefetch(), 5)
    rings["staging"].reserve(7, 7, 8)
    assert admission.share("b", "a", (Demand("verify", 2),)) is None
    assert admission.share("b", "a", ROW).deadline == 5


def test_a_leader_that_leaves_hands_its_transfer_to_the_oldest_sharer():
    admission, rings = fresh()
    admission.admit("a", prefetch(rows=0), 5)
    admission.share("b", "a", ROW)
    assert admission.share("c", "b", ROW).leader == "a"
    admission.cancel("a")
    assert admission.reservation("b").leader is None
    assert admission.reservation("c").leader == "b"
    assert levels(rings)["link"][4:6] == [6, 6]
    admission.cancel("b")
    admission.cancel("c")
    assert not any(map(any, levels(rings).values()))
