"""KL from top-k lists, against the sum over whole distributions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.evaluation.divergence import divergence, top_k_divergence

WEIGHTS = st.lists(st.floats(0.01, 10), min_size=6, max_size=6)


def normal(weights):
    return [weight / sum(weights) for weight in weights]


def top(probabilities, k):
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    return {i: math.log(probabilities[i]) for i in order[:k]}


def whole_kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@given(WEIGHTS, WEIGHTS, st.integers(1, 6))
def test_top_k_never_says_more_than_the_whole(p, q, k):
    p, q = normal(p), normal(q)
    got = top_k_divergence(top(p, k), top(q, k))
    assert 0 <= got <= whole_kl(p, q) + 1e-6


@given(WEIGHTS, WEIGHTS)
def test_whole_lists_give_the_whole_divergence(p, q):
    p, q = normal(p), normal(q)
    assert top_k_divergence(top(p, 6), top(q, 6)) == pytest.approx(
        whole_kl(p, q), abs=1e-6
    )


def test_by_hand():
    full = {1: math.log(0.5), 2: math.log(0.25)}
    lossy = {1: math.log(0.25), 3: math.log(0.5)}
    wanted = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert top_k_divergence(full, lossy) == pytest.approx(wanted)


def position(*pairs):
    return [[math.log(p), token, None] for token, p in pairs]


def test_the_first_token_is_left_out_and_the_rest_is_averaged():
    sure, half = position((1, 0.9), (2, 0.1)), position((1, 0.5), (2, 0.5))
    other = position((2, 0.8), (1, 0.2))
    full = [[other, sure, sure], [half, sure]]
    lossy = [[sure, sure, half], [sure, other]]
    got = divergence(full, lossy)
    one = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    two = 0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8)
    assert got["positions"] == 3
    assert got["nats_per_token"] == pytest.approx((one + two) / 3, abs=1e-6)
    assert got["nats_per_request"] == pytest.approx((one + two) / 2, abs=1e-6)
    assert got["max_nats"] == pytest.approx(two, abs=1e-6)
    assert got["same_argmax"] < 1


def test_answers_of_one_token_compare_nothing():
    assert divergence([[position((1, 1.0))]], [[position((1, 1.0))]]) == {
        "positions": 0
    }
