"""Acceptance curves against sums written out, and the published points."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.acceptance import (
    PUBLISHED_LLAMA_70B,
    PUBLISHED_QWEN_32B,
    EndingAnswers,
    Geometric,
    MissByKeep,
    survival_for,
)

survivals = st.floats(0, 1)
lengths = st.integers(1, 256)


@given(survival=survivals, x=lengths)
def test_geometric_is_the_sum_term_by_term(survival, x):
    by_hand = sum(survival**i for i in range(1, x + 1))
    found = Geometric(survival).accepted(x, 0.25)
    assert found == pytest.approx(by_hand, rel=1e-6, abs=1e-9)
    assert 0 <= found <= x


@given(survival=survivals, x=st.integers(1, 255), keep=st.floats(0.01, 0.99))
def test_more_drafts_or_more_kept_never_accept_fewer(survival, x, keep):
    curve = MissByKeep(survival)
    here = curve.accepted(x, keep)
    assert curve.accepted(x + 1, keep) >= here - 1e-9
    assert curve.accepted(x, keep + 0.01) >= here - 1e-9


def test_miss_grows_as_the_kept_share_shrinks():
    curve = MissByKeep(0.9, at_keep=0.25)
    assert curve.accepted(1, 0.25) == pytest.approx(0.9)
    assert curve.accepted(1, 0.5) == pytest.approx(1 - 0.1 / 3)  # (1-c)/c: 3 -> 1
    assert curve.accepted(1, 1.0) == 1
    assert curve.accepted(1, 0.01) == 0


def test_published_points():
    # arXiv:2605.17613 section 4.2, at c = 1/4 and x = 30.
    assert Geometric(PUBLISHED_LLAMA_70B).accepted(30, 0.25) == pytest.approx(23)
    assert Geometric(PUBLISHED_QWEN_32B).accepted(30, 0.25) == pytest.approx(19)
    assert PUBLISHED_QWEN_32B < PUBLISHED_LLAMA_70B < 1


@given(survival=st.floats(0.01, 0.9999), x=st.integers(1, 64))
def test_survival_is_found_back(survival, x):
    count = Geometric(survival).accepted(x, 1.0)
    assert survival_for(count, x) == pytest.approx(survival, abs=1e-6)


def test_answers_that_end_lose_half_a_round():
    # 9 + 1 tokens a round: 100 tokens take 10.5 rounds on average.
    curve = EndingAnswers(Geometric(1.0), output_tokens=100)
    assert curve.accepted(9, 0.5) == pytest.approx(100 / 10.5 - 1)
    assert EndingAnswers(Geometric(1.0), 4).accepted(100, 0.5) == 3
    assert EndingAnswers(Geometric(0.0), 1).accepted(1, 0.5) == 0


def test_half_a_round_is_what_a_simulation_loses():
    chance, outputs, rounds = random.Random(0), range(180, 220), 0
    for output in outputs:
        for _ in range(50):
            done = 0
            while done < output:
                accepted = next((i for i in range(20) if chance.random() > 0.95), 20)
                done += accepted + 1
                rounds += 1
    simulated = sum(outputs) * 50 / rounds - 1
    found = EndingAnswers(Geometric(0.95), 200).accepted(20, 0.25)
    assert found == pytest.approx(simulated, rel=0.03)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Geometric(1.1),
        lambda: Geometric(float("nan")),
        lambda: MissByKeep(0.5, at_keep=1),
        lambda: EndingAnswers(Geometric(0.5), 0),
        lambda: survival_for(31, 30),
    ],
)
def test_impossible_curves_are_refused(make):
    with pytest.raises(ConfigError):
        make()
