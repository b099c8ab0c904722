"""How many tokens an inner drafter proposes: what pays, and what is tried again."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.scheduling.acceptance import Acceptance, Prior
from vericache_sglang.scheduling.draft_length import FIRST_WAIT, LAST_WAIT
from vericache_sglang.scheduling.estimates import PROPOSALS_TRIALS
from vericache_sglang.scheduling.proposals import (
    ENTER,
    LEAVE,
    ProposalCost,
    Proposals,
    best_count,
)

SECONDS = st.floats(1e-6, 1e-1)
MOST = 6


def gain(p, cost, count):
    """Return tokens per second over those of rows without proposals."""
    tokens = 1.0 + sum(p**i for i in range(1, count + 1))
    return tokens / cost.of(count) * cost.row_s


@given(st.floats(0, 1), SECONDS, st.floats(0, 1e-1), st.floats(0, 1e-1))
def test_no_other_number_of_proposals_is_faster(p, row_s, token_s, drafter_s):
    cost = ProposalCost(row_s, token_s, drafter_s)
    count, found = best_count(p, cost, MOST)
    assert found == pytest.approx(gain(p, cost, count))
    assert found >= max(gain(p, cost, n) for n in range(MOST + 1)) - 1e-9


@pytest.mark.parametrize(
    ("p", "token_s", "drafter_s", "count"),
    [
        (0.9, 0.0, 0.0, MOST),  # tokens that cost nothing
        (0.9, 0.05, 0.0, MOST),
        (0.5, 0.15, 0.0, 2),
        (0.1, 0.2, 0.0, 0),
        (0.5, 0.2, 9.0, 0),  # a drafter that takes longer than it saves
        (0.0, 0.0, 0.0, 0),
        (1.0, 2.0, 0.0, 0),  # a token that takes longer than a row
    ],
)
def test_what_pays(p, token_s, drafter_s, count):
    assert best_count(p, ProposalCost(1.0, token_s, drafter_s), MOST)[0] == count


def test_a_row_that_takes_no_time_has_no_proposals():
    assert best_count(0.9, ProposalCost(0.0, 0.0), MOST) == (0, 1.0)


CHEAP = ProposalCost(1.0, 0.1)


def made(p, most=4):
    return Proposals(Acceptance(Prior(p, PROPOSALS_TRIALS)), most)


def test_what_pays_barely_is_kept_but_not_begun():
    rates = (n / 1000 for n in range(1000))
    p = next(p for p in rates if best_count(p, CHEAP, 4)[1] > LEAVE)
    assert best_count(p, CHEAP, 4)[1] < ENTER
    begun, kept = made(p), made(p)
    kept.count = 1
    for proposals in (begun, kept):
        proposals.choose(CHEAP)
    assert (begun.count, kept.count) == (0, 1)


@pytest.mark.parametrize(("cost", "most"), [(CHEAP, 30), (ProposalCost(1.0, 0.0), 250)])
def test_a_drafter_that_is_never_right_is_asked_less_and_less(cost, most):
    """Where it costs nothing, all evidence that is kept has to be against it."""
    proposals, asked = made(0.5), []
    proposals.choose(cost)
    assert proposals.count > 0
    for now in range(8 * LAST_WAIT):
        count = proposals.next(now)
        if count:
            asked.append(now)
            proposals.observe(count, 0)
            proposals.choose(cost)
    gaps = [b - a for a, b in pairwise(asked)]
    assert asked[0] == 0
    assert len(asked) < most
    assert gaps[-1] == LAST_WAIT
    assert FIRST_WAIT in gaps


def test_a_drafter_that_becomes_right_is_asked_again():
    proposals = made(0.5)
    for _ in range(40):
        proposals.observe(4, 0)
        proposals.choose(CHEAP)
    assert proposals.count == 0
    assert proposals.pace == 1.0
    for now in range(4 * FIRST_WAIT):
        count = proposals.next(now)
        if count:
            proposals.observe(count, count)
            proposals.choose(CHEAP)
    assert proposals.count == 4
    assert proposals.pace > 3.0


def test_a_drafter_that_is_right_is_soon_asked_for_as_many_as_may_be():
    proposals, asked = made(0.5), []
    for now in range(4):
        proposals.choose(CHEAP)
        asked.append(proposals.next(now))
        proposals.observe(asked[-1], asked[-1])
    assert asked == [1, 2, 4, 4]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("drafter_s", [0.0, 0.5])
@pytest.mark.parametrize("token_s", [0.003, 0.03, 0.1, 0.3, 1.0])
def test_random_tokens_cost_little_time(rows, drafter_s, token_s):
    """A server's first requests have 256 tokens each; no proposal is accepted."""
    prior, cost = Prior(0.5, PROPOSALS_TRIALS), ProposalCost(1.0, token_s, drafter_s)
    requests, lost_s = [Proposals(Acceptance(prior), 4) for _ in range(rows)], 0.0
    for proposals in requests:
        proposals.choose(cost)
    for now in range(256):
        for proposals in requests:
            count = proposals.next(now)
            lost_s += cost.of(count) - cost.row_s
            if count:
                proposals.observe(count, 0)
                proposals.choose(cost)
    assert lost_s < 0.02 * 256 * rows


def test_a_request_without_proposals_has_none():
    proposals = made(1.0, most=0)
    proposals.choose(CHEAP)
    assert [proposals.next(now) for now in range(3)] == [0, 0, 0]
    assert proposals.pace == 1.0
