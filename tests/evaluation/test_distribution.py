"""The chi-square test of answers: right ones pass, wrong ones do not."""

import random
from functools import cache

import numpy as np
import pytest

from vericache_sglang.evaluation.distribution import (
    PARAMS,
    exact_distribution,
    probability,
)

TABLE = np.log(np.random.default_rng(1).dirichlet(np.ones(12), size=13))


def following(prefix):
    """Return log-probabilities that depend on the token before."""
    return TABLE[prefix[-1] if prefix else 12]


def drawn(count, exact, seed=0):
    rng, answers = random.Random(seed), []
    for _ in range(count):
        answer = ()
        for _ in range(3):
            weights = exact(answer).tolist()
            answer += (rng.choices(range(12), weights)[0],)
        answers.append(answer)
    return answers


def test_a_distribution_by_hand():
    logprobs = np.log([0.5, 0.3, 0.15, 0.05])
    plain = exact_distribution(logprobs, {"temperature": 1.0})
    assert plain == pytest.approx([0.5, 0.3, 0.15, 0.05])
    cold = exact_distribution(logprobs, {"temperature": 0.5})
    assert cold == pytest.approx(np.array([25, 9, 2.25, 0.25]) / 36.5)
    for cut in ({"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.5}):
        found = exact_distribution(logprobs, {"temperature": 1.0, **cut})
        assert found == pytest.approx([5 / 8, 3 / 8, 0, 0]), cut


@pytest.mark.parametrize("kind", PARAMS)
def test_right_answers_pass_and_those_of_another_model_do_not(kind):
    @cache
    def exact(prefix):
        return exact_distribution(following(prefix), PARAMS[kind])

    @cache
    def other(prefix):
        return exact_distribution(following(prefix)[::-1], PARAMS[kind])

    right = [probability(drawn(2000, exact, seed), exact) for seed in range(5)]
    assert min(right) > 0.001
    assert max(right) > 0.1
    assert probability(drawn(2000, other), exact) < 1e-6


def test_one_wrong_answer_in_five_is_found():
    @cache
    def exact(prefix):
        return exact_distribution(following(prefix), PARAMS["temperature"])

    @cache
    def other(prefix):
        return exact_distribution(following(prefix)[::-1], PARAMS["temperature"])

    mixed = drawn(4000, exact) + drawn(1000, other)
    assert probability(mixed, exact) < 1e-6


def test_too_few_answers_are_no_proof():
    with pytest.raises(ValueError, match="3 answers are too few"):
        probability([(1,), (2,), (1,)], lambda prefix: np.ones(12) / 12)
