"""Metrics by hand and by their invariants; appendix A by enumeration."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.evaluation.quality import (
    curve,
    first_divergence,
    interval,
    rouge_l,
    step_divergences,
    token_match,
    word_f1,
)

WEIGHTS = st.lists(st.floats(0.01, 10), min_size=4, max_size=4)
TOKENS = st.lists(st.integers(0, 3), max_size=8)
WORDS = st.lists(st.sampled_from(["red", "blue", "green"]), max_size=8)


def position(weights):
    """Return a whole list as SGLang reports it, the most probable token first."""
    shares = np.array(weights) / np.sum(weights)
    order = np.argsort(-shares)
    return [[math.log(shares[i]), int(i), None] for i in order]


@given(WEIGHTS, WEIGHTS)
def test_kl_is_not_negative_and_0_only_for_equal_distributions(p, q):
    same, other = position(p), position(q)
    first = position([1, 1, 1, 1])  # is left out
    assert step_divergences([first, same], [first, same]) == pytest.approx(
        [0], abs=1e-9
    )
    (found,) = step_divergences([first, same], [first, other])
    shares = [np.array(w) / np.sum(w) for w in (p, q)]
    assert found >= 0
    if np.abs(shares[0] - shares[1]).max() > 1e-3:  # Pinsker: at least 2 * 1e-6 / 4
        assert found > 1e-7


def test_kl_by_hand_and_of_what_underflowed():
    first, half, most = position([1, 1]), position([1, 1]), position([3, 1])
    wanted = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert step_divergences([first, half], [first, most]) == pytest.approx([wanted])
    never = [[0.0, 0, None], [None, 1, None]]
    (found,) = step_divergences([first, half], [first, never])
    assert 40 < found < 50  # 0.5 * 87 nats of the smallest float32


STEPS, TOKEN = 3, range(3)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_the_chain_rule_against_enumeration(seed):
    """Appendix A: the KL of sequences is the sum of expected KLs by step."""
    rng = np.random.default_rng(seed)
    prefixes = [s for t in range(STEPS) for s in product(TOKEN, repeat=t)]
    full, lossy = ({s: rng.dirichlet(np.ones(3)) for s in prefixes} for _ in range(2))

    def log(model, sequence):
        return sum(math.log(model[sequence[:t]][x]) for t, x in enumerate(sequence))

    whole = {s: log(full, s) for s in product(TOKEN, repeat=STEPS)}
    wanted = sum(math.exp(lp) * (lp - log(lossy, s)) for s, lp in whole.items())
    expected = [0.0] * STEPS
    first = position([1, 1, 1])
    for prefix in prefixes:
        lists = [[first, position(model[prefix])] for model in (full, lossy)]
        (step,) = step_divergences(*lists)
        expected[len(prefix)] += math.exp(log(full, prefix)) * step
    assert sum(expected) == pytest.approx(wanted, abs=1e-6)
    assert curve([expected])[1][-1] == pytest.approx(wanted, abs=1e-6)


def test_ended_sequences_add_nothing_to_the_curve():
    means, sums = curve([[1.0, 3.0], [2.0]])
    assert means == [1.5, 1.5]
    assert sums == [1.5, 3.0]
    assert curve([]) == ([], [])


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=12))
def test_a_bootstrap_interval_covers_the_mean_and_stays_inside(values):
    found = interval(values)
    assert found["value"] == pytest.approx(np.mean(values), abs=1e-9)
    assert found["low"] - 1e-9 <= found["value"] <= found["high"] + 1e-9
    assert min(values) - 1e-9 <= found["low"]
    assert found["high"] <= max(values) + 1e-9


def test_bootstrap_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    found = [interval(rng.normal(5, 1, 40).tolist()) for _ in range(200)]
    covered = sum(each["low"] <= 5 <= each["high"] for each in found)
    assert 175 <= covered <= 199


def test_ratios_weigh_samples_by_their_size():
    assert interval([1, 0], [1, 9])["value"] == 0.1
    assert interval([], []) is None
    assert interval([0.0], [0.0]) is None


@given(TOKENS, TOKENS)
def test_first_divergence_and_agreement(a, b):
    at, share = first_divergence(a, b), token_match(a, b)
    assert (at is None) == (a == b) == (share == 1.0)
    if at is not None:
        assert a[:at] == b[:at]
        assert a[at : at + 1] != b[at : at + 1]
        assert share >= at / max(len(a), len(b))


def test_texts_by_hand():
    assert word_f1("The cat sat.", "a cat, sat down") == pytest.approx(2 * 2 / (2 + 3))
    assert word_f1("x", "y") == 0.0
    # The longest common subsequence of words is "a b d": 3 of 4 and 3 of 5.
    assert rouge_l("a b c d", "a x b d e") == pytest.approx(2 * 3 / 9)
    assert rouge_l("b a", "a b") == 0.5
    assert (rouge_l("", ""), rouge_l("", "a"), word_f1("", "")) == (1.0, 0.0, 1.0)


def common(a, b):
    """Return the length of the longest common subsequence, by its definition."""
    if not a or not b:
        return 0
    if a[-1] == b[-1]:
        return common(a[:-1], b[:-1]) + 1
    return max(common(a[:-1], b), common(a, b[:-1]))


@given(WORDS, WORDS)
def test_rouge_is_of_the_longest_common_subsequence(a, b):
    size = len(a) + len(b)
    wanted = 2 * common(a, b) / size if size else 1.0
    assert rouge_l(" ".join(a), " ".join(b)) == pytest.approx(wanted)
    assert word_f1(" ".join(a), " ".join(b)) >= wanted - 1e-9
