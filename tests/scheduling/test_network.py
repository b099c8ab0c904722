"""Rings of a server's link and pool: never more than there is, busy when full."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.scheduling.network import (
    POOL,
    STORE_LINK,
    WINDOW_S,
    WINDOWS,
    NetworkRings,
)


def test_slots_are_held_until_released():
    rings = NetworkRings(2)
    assert rings.hold("a", 1.0)
    assert not rings.hold("b", 1.0, spare=1)
    assert rings.hold("b", 1.0)
    assert not rings.hold("c", 0.0)
    assert rings.reserve("c", 0.1, 2.0) is None
    rings.release("a")
    assert rings.reserve("c", 0.1, 2.0) is not None


def test_a_reservation_by_hand():
    rings = NetworkRings(1)
    rings.advance(1.0)
    # 0.1 s are two windows; drafts are expected 2 s, 40 windows, after the 20th.
    assert rings.reserve("a", 0.1, 2.0) == pytest.approx((59 * WINDOW_S, 61 * WINDOW_S))
    # The next fits around it: the verification's window is taken too.
    assert rings.load_by(0.1, 2.0) == pytest.approx(58 * WINDOW_S)
    assert rings.reserve("b", 0.1, 2.0) == pytest.approx((56 * WINDOW_S, 58 * WINDOW_S))
    # A slot that is reserved is not held, nor a slot that is held begun.
    assert not rings.hold("c", 0.1)
    assert rings.begin("a")
    assert not rings.begin("b")
    rings.release("a")
    assert rings.begin("b")


def test_the_pool_is_resized_and_the_reservations_of_those_that_went_are_released():
    rings = NetworkRings(0)
    assert rings.reserve("a", 0.1, 2.0, 60) is None
    rings.resize(100)
    assert rings.reserve("a", 0.1, 2.0, 60)
    # Its slots are free again behind its verification, and before its load.
    assert rings.reserve("b", 0.1, 2.0, 60) == pytest.approx((36 * 0.05, 38 * 0.05))
    assert rings.reserve("c", 0.1, 2.0, 101) is None
    used = {STORE_LINK: 4 / WINDOWS, POOL: 0.6}
    assert rings.reserved == pytest.approx(used)
    assert rings.starts_s("a") == pytest.approx(39 * WINDOW_S)
    rings.resize(60)
    assert rings.free() == 0
    rings.retain(["b", "c"])
    assert rings.starts_s("a") is rings.starts_s("c") is None
    assert rings.reserve("d", 0.1, 2.0, 60) == pytest.approx((39 * 0.05, 41 * 0.05))
    rings.retain([])
    assert rings.free() == 60


def test_a_full_link_is_busy_and_a_long_load_takes_all_of_it():
    rings = NetworkRings(4)
    assert rings.hold("long", 1e6)
    assert rings.load_by(0.2, 1.0) is None
    assert rings.load_by(1e6, 1.0) is None
    rings.advance(4.0)
    # Its last window is the 254th; four more.
    assert rings.load_by(0.2, 1.0) == pytest.approx((WINDOWS + 3) * WINDOW_S)


@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["hold", "reserve", "begin", "release", "advance"]),
            st.sampled_from("abcdef"),
            st.floats(0, 3),
            st.floats(0, 15),
        ),
        max_size=60,
    ),
    slots=st.integers(1, 4),
)
def test_no_more_is_held_than_there_is(moves, slots):
    rings, now, known = NetworkRings(slots), 0.0, set()
    for move, rid, load_s, eta_s in moves:
        if move == "advance":
            now += eta_s
            rings.advance(now)
        elif move == "release":
            rings.release(rid)
            known.discard(rid)
        elif move == "begin":
            if rid in known and rid not in rings.held:
                rings.begin(rid)
        elif rid not in known:
            found = (
                rings.hold(rid, load_s)
                if move == "hold"
                else rings.reserve(rid, load_s, eta_s)
            )
            if found:
                known.add(rid)
            if move == "reserve" and found:
                first, end = found
                assert now - WINDOW_S < first <= end - load_s + 1e-9
        assert len(rings.held) <= slots
        assert rings.free() <= slots - len(rings.held)
    for rid in "abcdef":
        rings.release(rid)
    assert rings.free() == slots
