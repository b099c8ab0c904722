"""Where a drafter's requests are decoded, by what tokens were measured to take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.path_paces import EXPLORE, LEAST_TOKENS, PathPaces


def paces(near=0.0, far=0.0, first=0.0, *, others=False):
    times = (Ewma(each, least=0.0, most=10.0) for each in (near, first))
    found = PathPaces(*times, others=others)
    if far:
        found.observe(50 * far, 50)
    return found


def tried(known, count):
    return [known.drafts() for _ in range(count)]


EXPLORED = ([False] * (EXPLORE - 1) + [True]) * 3


def test_before_that_is_measured_every_second_request_beside_others_drafts_here():
    assert tried(paces(others=True), 6) == [False, True] * 3
    assert tried(paces(), len(EXPLORED)) == EXPLORED


@pytest.mark.parametrize("others", [False, True])
def test_requests_draft_here_where_that_is_faster(others):
    fast = paces(0.2, 0.1, others=others)
    assert all(tried(fast, 3 * EXPLORE)[EXPLORE:])


@pytest.mark.parametrize("others", [False, True])
def test_where_it_is_slower_it_is_tried_now_and_then(others):
    slow = paces(0.1, 0.2, others=others)
    found = tried(slow, 4 * EXPLORE)
    assert sum(found[:EXPLORE]) <= 2
    assert [sum(found[i : i + EXPLORE]) for i in (16, 32, 48)] == [1, 1, 1]
    for _ in range(100):
        slow.observe(0.05, 1)
    assert sum(tried(slow, EXPLORE)) > EXPLORE / 2


@given(
    alone=st.floats(0.5, 1.5), relief=st.floats(0.0, 0.5), burden=st.floats(0.0, 0.8)
)
def test_requests_become_as_fast_on_both_paths(alone, relief, burden):
    """Each of 8 at once that drafts relieves verifiers, and burdens other drafters."""
    known, recent, shares = paces(1.0, others=True), [False] * 8, []
    for _ in range(40 * EXPLORE):
        share = sum(recent) / len(recent)
        known.near = Ewma(1.0 - relief * share, least=0.0, most=10.0)
        recent = [*recent[1:], known.drafts()]
        for _ in range(8 * recent[-1]):
            known.observe(10 * (alone + burden * share), 10)
        shares.append(share)
    mean = sum(shares[-200:]) / 200
    gap = alone - 1.0 + (burden + relief) * mean
    assert abs(gap) < 0.2 or (mean < 0.15 if gap > 0 else mean > 0.85)


def test_paces_are_compared_under_the_same_load():
    known = paces(0.2, 0.1)  # a busy verifier
    known.near = Ewma(0.02, least=0.0, most=10.0)  # is not busy any more
    assert sum(tried(known, EXPLORE)) > EXPLORE / 2
    assert known.completes(0.9, 100)
    assert not known.completes(1.1, 100)


def test_residual_kv_follows_if_it_comes_while_drafts_are_needed():
    assert paces(0.2, 0.1).completes(9.9, 100)
    assert not paces(0.2, 0.1).completes(10.1, 100)
    assert paces(0.2).completes(10.1, 100), "before drafts were measured"
    assert not paces(0.2, 0.1).completes(float("inf"), 100)


def test_a_request_returns_if_its_own_drafts_made_it_slow():
    known = paces(0.1, 0.1)
    for few in (1, LEAST_TOKENS):  # what so many tokens may take, in any case
        assert not known.returns(0.12 * LEAST_TOKENS, few)
        assert known.returns(0.13 * LEAST_TOKENS, few)
    assert not known.returns(0.24 * LEAST_TOKENS, 2 * LEAST_TOKENS)
    assert not paces(0.0, 0.1).returns(100.0, LEAST_TOKENS)


WHOLE = ([True] + [False] * (EXPLORE - 1)) * 3
"""As many are read whole for a try."""


@pytest.mark.parametrize(
    ("near", "first", "load_s", "expected"),
    [
        (0.1, 5.0, 4.9, [True] * len(WHOLE)),
        (0.1, 5.0, 5.1, WHOLE),
        (0.1, 5.0, 11.3, WHOLE),
        (0.1, 5.0, 11.5, [False] * len(WHOLE)),
        (0.1, 5.0, float("inf"), [False] * len(WHOLE)),
        (0.0, 5.0, 0.0, [False] * len(WHOLE)),
    ],
    ids=["sooner", "perhaps", "hardly", "later", "no link was measured", "no pace was"],
)
def test_requests_are_read_whole_that_end_sooner_so(near, first, load_s, expected):
    known = paces(near, first=first)
    assert [known.reads_whole(load_s, 64) for _ in WHOLE] == expected


def test_beside_others_a_request_may_end_somewhat_later_as_it_relieves_verifiers():
    known = paces(0.1, first=5.0, others=True)  # 11.4 s, and 13.7 with a fifth more
    assert [known.reads_whole(7.2, 64) for _ in WHOLE] == [True] * len(WHOLE)
    assert [known.reads_whole(7.4, 64) for _ in WHOLE] == WHOLE


def test_what_is_being_read_counts_twice():
    known = paces(0.1, first=9.0)  # 15.4 s
    assert [known.reads_whole(6.0, 64, 2.9) for _ in WHOLE] == [True] * len(WHOLE)
    assert [known.reads_whole(6.0, 64, 3.1) for _ in WHOLE] == WHOLE


def test_what_was_read_whole_and_slow_is_tried_again_now_and_then():
    known = paces(0.1, first=5.0)
    known.observe_whole(23.0, 2.0, 70)
    assert [known.reads_whole(1.0, 64) for _ in WHOLE] == WHOLE
    known.observe_whole(5.0, 2.0, 0)  # aborted: nothing is learned
    assert known.whole.value == pytest.approx(0.3)
    for _ in range(100):
        known.observe_whole(5.5, 2.0, 70)
    assert known.reads_whole(8.0, 64), "with the pace here, which is a half"
    assert [known.reads_whole(8.4, 64) for _ in WHOLE] == WHOLE
