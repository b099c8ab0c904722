"""Where a drafter's requests are decoded, by what tokens were measured to take."""

from collections import Counter
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.path_paces import (
    EXPLORE,
    LATER,
    LEAST_TOKENS,
    PathPaces,
)
from vericache_sglang.scheduling.paths import Path, PathChoice

B1, B2, P1 = Path.B1, Path.B2, Path.P1_CACHED


def paces(near=0.0, first=0.0, slowdown=0.0, *, others=False):
    times = (Ewma(each, least=0.0, most=10.0) for each in (near, first))
    found = PathPaces(*times, others=others)
    if slowdown:
        found.observe(50 * near * slowdown, 50)
    return found


def chosen(known, count, shares=None, load=1.0, **own):
    """Count the paths of so many requests under one load."""
    choice, taken = PathChoice(), Counter()
    choice.shares = shares or {}
    given = {"tokens": 64, "draft_s": 0.0, "load_s": inf, "queued_s": 0.0, **own}
    for _ in range(count):
        path = known.choose(choice, known.ends_s(**given), given["load_s"], load)
        taken[path] += 1
    return taken


@pytest.mark.parametrize(
    ("known", "times", "ends"),
    [
        # 64 tokens of 0.1 s after 5 s.
        (paces(0.1, 5.0), (7.0, 4.0, 1.0), (11.4, 11.4, 1 + 4 + 6.4)),
        # 20 tokens before the draft KV is here, then 44 in half the time.
        (paces(0.1, 5.0, 0.5), (7.0, 4.0, 0.0), (11.4, 7 + 2.2, 10.4)),
        (paces(0.1, 5.0, 0.5), (4.0, 4.0, 0.0), (11.4, 5 + 3.2, 10.4)),
        (paces(0.1, 5.0, 0.5), (11.4, 4.0, 0.0), (11.4, inf, 10.4)),
        (paces(0.1, 5.0, 0.5), (inf, 4.0, 0.0), (11.4, inf, 10.4)),
        (paces(0.1, 5.0), (7.0, inf, nan), (11.4, 11.4, inf)),
        (paces(0.0, 5.0), (7.0, 0.1, 0.0), (0.0, 0.0, inf)),
        (paces(0.0, 5.0), (inf, 0.1, 0.0), (0.0, inf, inf)),
    ],
    ids=[
        *("as at the verifier", "faster", "at once", "too late", "cannot draft"),
        *("no link was measured", "no pace was", "no pace, cannot draft"),
    ],
)
def test_when_requests_would_end(known, times, ends):
    draft_s, load_s, queued_s = times
    found = known.ends_s(64, draft_s, load_s, queued_s)
    assert found == pytest.approx(dict(zip((B1, P1, B2), ends, strict=True)))


def test_what_is_read_whole_has_the_pace_that_was_measured_here():
    known = paces(0.1, 5.0)
    known.observe_whole(23.0, 2.0, 70)
    known.observe_whole(5.0, 2.0, 0)  # aborted: nothing is learned
    assert known.ends_s(64, inf, 2.0, 0.0)[B2] == pytest.approx(2 + 64 * 0.3)


def test_one_that_is_alone_takes_the_path_on_which_it_ends_first():
    half = {B1: 0.5, P1: 0.5}
    assert chosen(paces(0.1), EXPLORE - 1, half) == {B1: EXPLORE - 1}
    assert chosen(paces(0.1, 0.0, 0.9), EXPLORE - 1, half) == {P1: EXPLORE - 1}
    whole = chosen(paces(0.1, 5.0), EXPLORE - 1, half, load_s=4.9)
    assert whole == {B2: EXPLORE - 1}


@given(slowdown=st.floats(0.85, 1.15), share=st.floats(0.1, 0.9))
def test_beside_others_alike_paths_have_the_shares_of_the_program(slowdown, share):
    known = paces(0.1, 0.0, slowdown, others=True)
    count = 40 * EXPLORE
    taken = chosen(known, count, {B1: 1 - share, P1: share})
    assert taken[P1] / count == pytest.approx(share, abs=0.1)


@pytest.mark.parametrize(
    ("later", "load", "exchanged"),
    [(0.9, 1, True), (1.1, 1, False), (0.4, 0.5, True), (0.6, 0.5, False), (0.1, 0, 0)],
)
def test_the_fewer_requests_come_the_less_later_may_one_end(later, load, exchanged):
    known = paces(0.1, 0.0, 1 + later * LATER, others=True)
    taken = chosen(known, EXPLORE - 1, {P1: 1.0}, load)
    assert (taken[P1] > EXPLORE / 2) == exchanged
    assert exchanged or not taken[P1]


def test_what_is_slower_is_tried_now_and_then():
    slow = paces(0.1, 0.0, 2.5, others=True)
    count = 8 * EXPLORE
    assert chosen(slow, count, {P1: 1.0}) == {B1: count - 8, P1: 8}
    both = chosen(slow, count, {P1: 1.0}, 0.0, load_s=6.3)
    assert both == {B1: count - 8, P1: 4, B2: 4}
    assert chosen(paces(0.1, 9.0), count, load_s=0.0) == {B2: count - 8, B1: 4, P1: 4}
    assert B2 not in chosen(slow, count, load_s=6.5), "its load alone takes longer"
    assert P1 not in chosen(slow, count, draft_s=inf)
    for _ in range(100):
        slow.observe(5 * 0.05, 5)
    assert slow.slowdown.value == pytest.approx(0.5, abs=1e-3)
    assert chosen(slow, EXPLORE, {P1: 1.0})[P1] >= EXPLORE - 1


def test_paces_are_compared_under_the_same_load():
    known = paces(0.2, 0.0, 0.5)  # a busy verifier
    known.near = Ewma(0.02, least=0.0, most=10.0)  # is not busy any more
    assert chosen(known, EXPLORE - 1)[P1] == EXPLORE - 1
    assert known.completes(0.9, 100)
    assert not known.completes(1.1, 100)


def test_residual_kv_follows_if_it_comes_while_drafts_are_needed():
    assert paces(0.2, 0.0, 0.5).completes(9.9, 100)
    assert not paces(0.2, 0.0, 0.5).completes(10.1, 100)
    assert paces(0.2).completes(10.1, 100), "before drafts were measured"
    assert not paces(0.2, 0.0, 0.5).completes(inf, 100)


def test_a_request_returns_if_its_own_drafts_made_it_slow():
    known = paces(0.1, 0.0, 1.0)
    for few in (1, LEAST_TOKENS):  # what so many tokens may take, in any case
        assert not known.returns(0.12 * LEAST_TOKENS, few, load=1)
        assert known.returns(0.13 * LEAST_TOKENS, few, load=1)
    assert not known.returns(0.24 * LEAST_TOKENS, 2 * LEAST_TOKENS, load=1)
    assert not paces().returns(100.0, LEAST_TOKENS, load=1)
    beside = paces(0.1, 0.0, 1.0, others=True)
    for load in (0.0, 0.5):
        most = (1.25 + LATER * load) * 0.1 * LEAST_TOKENS
        assert not beside.returns(0.99 * most, LEAST_TOKENS, load)
        assert beside.returns(1.01 * most, LEAST_TOKENS, load)
