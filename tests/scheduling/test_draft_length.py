"""Acceptance, draft length and patience against sums and exhaustive search."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.acceptance import (
    Acceptance,
    Prior,
    expected_accepted,
)
from vericache_sglang.scheduling.draft_length import (
    Patience,
    RoundCost,
    best_length,
)

PROBABILITIES = st.floats(0, 1) | st.sampled_from([0.0, 0.9, 0.99, 1 - 1e-9, 1.0])
COSTS = st.builds(
    RoundCost,
    plain_s=st.just(1.0),
    draft_s=st.floats(0.01, 2),
    verify_s=st.floats(0, 30),
    verify_token_s=st.floats(0, 1),
    prefetch_s=st.just(0.0) | st.floats(0, 300),
)
COST = RoundCost(1.0, 0.25, 1.0, 0.05, 0.0)


def gain(p, cost, length):
    """Return the tokens of a round per token decoded plainly in the same time."""
    tokens = 1 + sum(p**i for i in range(1, length + 1))
    forwards = length * cost.draft_s + cost.verify_s
    forwards += (length + 1) * cost.verify_token_s
    return tokens * cost.plain_s / max(forwards, cost.prefetch_s)


@given(PROBABILITIES, st.integers(0, 300))
def test_the_expected_drafts_are_the_sum_of_powers(p, length):
    by_hand = sum(p**i for i in range(1, length + 1))
    assert expected_accepted(p, length) == pytest.approx(by_hand, rel=1e-9, abs=1e-12)


def test_a_wrong_draft_counts_once_and_those_behind_it_not_at_all():
    short, long = Acceptance(Prior()), Acceptance(Prior())
    short.observe(4, 3)
    long.observe(64, 3)
    assert short.p == long.p
    # Three of four, and the prior's 4 tokens: 0.95 of 16 before the same update.
    shared = (0.95 * 16 + 3) / (16 + 4)
    assert short.p == pytest.approx((3 + 4 * shared) / 8)


def test_the_last_rounds_decide():
    estimate, kept, trials = Acceptance(Prior()), 0.0, 0.0
    for age, accepted in enumerate(reversed([16] * 50 + [0] * 8)):
        kept += 0.875**age * accepted
        trials += 0.875**age * max(1, accepted)
    for accepted in [16] * 50 + [0] * 8:
        estimate.observe(16, accepted)
    # The prior's 4 tokens lie between nothing and all accepted.
    assert kept / (trials + 4) < estimate.p < (kept + 4) / (trials + 4)


@pytest.mark.parametrize(("start", "later"), [(0.98, 0.5), (0.3, 0.95)])
def test_a_request_that_changes_is_followed(start, later):
    found = []
    for seed in range(20):
        rnd, estimate = Random(seed), Acceptance(Prior())
        for p in [start] * 100 + [later] * 40:
            accepted = 0
            while accepted < 32 and rnd.random() < p:
                accepted += 1
            estimate.observe(32, accepted)
        found.append(estimate.p)
    # The prior still remembers the first hundred rounds.
    assert sum(found) / 20 == pytest.approx(later, abs=0.12)


def test_one_request_teaches_the_others():
    prior = Prior()
    teacher, newcomer = Acceptance(prior), Acceptance(prior)
    for _ in range(200):
        teacher.observe(8, 1)
    assert prior.p == pytest.approx(0.5, abs=0.06)
    assert newcomer.p == prior.p


def test_rejections_are_forgotten_as_requests_arrive():
    prior = Prior()
    for _ in range(200):
        Acceptance(prior).observe(8, 0)
    assert prior.p < 0.25
    found = []
    for _ in range(400):
        prior.age()
        found.append(prior.p)
    assert found == sorted(found)
    assert found[39] < 0.5
    assert found[-1] == pytest.approx(Prior().p, abs=0.01)


def test_one_request_in_about_twenty_tries_what_others_were_rejected_for():
    prior, tried = Prior(), []
    for number in range(500):
        prior.age()
        if prior.p > 0.65:  # drafting would pay
            tried.append(number)
            for _ in range(3):
                Acceptance(prior).observe(4, 0)
    assert tried[0] == 0, "nothing is known"
    assert 15 <= 500 / len(tried) <= 36


def test_the_first_drafts_of_a_request_are_few():
    estimate = Acceptance(Prior())
    assert estimate.supported(4) == 4
    estimate.observe(4, 0)
    assert estimate.supported(4) == 4
    lengths = []
    for _ in range(4):
        lengths.append(estimate.supported(4))
        estimate.observe(estimate.supported(4), estimate.supported(4))
    assert lengths == [4, 8, 23, 66]


def test_first_drafts_are_as_many_as_recent_requests_had_accepted():
    prior = Prior()
    for _ in range(3):
        Acceptance(prior).observe(32, 16)
    newcomer = Acceptance(prior)
    # 16 a cycle, and one cycle of nothing among them: twice 48 / 4, but for the decay.
    assert newcomer.supported(4) == 23
    newcomer.observe(23, 0)
    assert newcomer.supported(4) == 4
    for _ in range(200):
        prior.age()
    assert Acceptance(prior).supported(4) == 4


@given(st.lists(st.tuples(st.integers(0, 64), st.floats(0, 1)), max_size=40))
def test_an_estimate_is_a_probability(rounds):
    estimate = Acceptance(Prior())
    for drafted, part in rounds:
        estimate.observe(drafted, int(drafted * part))
        assert 0.0 <= estimate.p <= 1.0


def test_a_round_without_drafts_says_nothing():
    estimate = Acceptance(Prior())
    estimate.observe(0, 0)
    assert estimate.p == Prior().p


@pytest.mark.parametrize(("drafted", "accepted"), [(4, 5), (4, -1), (-1, -1)])
def test_impossible_rounds_are_refused(drafted, accepted):
    with pytest.raises(InvariantError, match="drafts accepted"):
        Acceptance(Prior()).observe(drafted, accepted)
    with pytest.raises(InvariantError, match="cannot start"):
        Prior(1.5)


@pytest.mark.parametrize(
    ("prefetch_s", "length", "by_hand"),
    [
        # 0.5 + 0.25 + 1 tokens for 2 drafts, a verification and its 3 tokens; one
        # draft gains 1.5 / 1.35, three 1.875 / 1.95.
        (0.0, 1, 1.5 / 1.35),
        # The reload pays for 5 drafts: 0.25 * 5 + 1 + 0.05 * 6 = 2.55.
        (2.55, 5, 1.96875 / 2.55),
    ],
    ids=["forwards", "prefetch"],
)
def test_a_choice_by_hand(prefetch_s, length, by_hand):
    choice = best_length(0.5, replace(COST, prefetch_s=prefetch_s), 64)
    assert (choice.length, choice.gain) == (length, pytest.approx(by_hand))


@given(PROBABILITIES, COSTS, st.integers(1, 256))
@example(1.0, RoundCost(1.0, 1.0, 0.0, 0.0, 5.0), 64)
@example(0.8, RoundCost(1.0, 1.0, 0.0, 0.0, 5.0), 64)
def test_no_other_length_gains_more(p, cost, most):
    choice = best_length(p, cost, most)
    assert 1 <= choice.length <= most
    assert choice.gain == pytest.approx(gain(p, cost, choice.length), rel=1e-9)
    best = max(gain(p, cost, length) for length in range(1, most + 1))
    assert choice.gain >= best * (1 - 1e-9)


def test_of_two_equals_the_shorter_is_drafted():
    # Nothing is ever accepted and the reload outlasts every round: all gain the same.
    assert best_length(0.0, replace(COST, prefetch_s=1000.0), 64).length == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: replace(COST, plain_s=0.0),
        lambda: replace(COST, draft_s=0.0),
        lambda: replace(COST, verify_s=-1.0),
        lambda: replace(COST, verify_token_s=float("inf")),
        lambda: replace(COST, prefetch_s=float("nan")),
        lambda: best_length(0.9, COST, 0),
    ],
)
def test_impossible_costs_and_lengths_are_refused(make):
    with pytest.raises(InvariantError, match=r"out of bounds|>= 1 token, got 0"):
        make()


def test_the_rest_of_an_answer_is_expected_to_be_more_like_others():
    acceptance = Acceptance(Prior(0.5, 8.0))
    acceptance.observe(8, 8)
    of_all = (8 + 4) / (8 + 8)
    assert acceptance.p == (8 + 4 * of_all) / (8 + 4)
    assert acceptance.rest_p == (8 + 16 * of_all) / (8 + 16)


def test_patience_doubles_and_starts_over():
    patience = Patience()
    assert [patience.wait() for _ in range(7)] == [64, 128, 256, 512, 1024, 1024, 1024]
    patience.reset()
    assert patience.wait() == 64
