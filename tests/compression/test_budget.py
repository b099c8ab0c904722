"""The equal-count rule against a per-token oracle, and its invariants."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.compression.budget import (
    Budget,
    budget_for,
    code_from,
    coded_rows,
    keep_indices,
    residual_indices,
)
from vericache_sglang.errors import CompressionError


def oracle(scores: list[float], budget: Budget) -> list[int]:
    """Choose token by token: protected first, then best score, then earliest."""

    def protected(token: int) -> bool:
        return token < budget.sinks or token >= budget.offered - budget.recent

    def rank(token: int) -> tuple[bool, float, int]:
        score = scores[token]
        return (not protected(token), math.inf if math.isnan(score) else -score, token)

    return sorted(sorted(range(budget.offered), key=rank)[: budget.kept])


@st.composite
def cases(draw):
    offered = draw(st.integers(1, 24))
    kept = draw(st.integers(1, offered))
    sinks = draw(st.integers(0, kept))
    recent = draw(st.integers(0, kept - sinks))
    some = st.floats(width=32, allow_nan=True, allow_infinity=True)
    repeated = st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf, -math.inf])
    row = st.lists(st.one_of(some, repeated), min_size=offered, max_size=offered)
    return Budget(offered, kept, sinks, recent), [draw(row), draw(row)]


@given(cases())
def test_indices_equal_the_oracle(case):
    budget, rows = case
    chosen = keep_indices(torch.tensor(rows, dtype=torch.float32), budget)
    assert chosen.tolist() == [oracle(row, budget) for row in rows]


@given(cases())
def test_kept_and_dropped_are_every_token_once(case):
    budget, rows = case
    kept = keep_indices(torch.tensor(rows, dtype=torch.float32), budget)
    dropped = residual_indices(kept, budget.offered)
    assert dropped.shape == (2, budget.dropped)
    both = torch.cat([kept, dropped], dim=1).sort(dim=1).values
    assert both.tolist() == [list(range(budget.offered))] * 2


@given(
    st.integers(1, 5000),
    st.floats(0.001, 1.0),
    st.integers(0, 64),
    st.integers(0, 64),
    st.sampled_from([1, 16]),
)
def test_budget_is_whole_pages_and_at_least_the_share(pages, keep, sinks, recent, page):
    offered = pages * page
    budget = budget_for(offered, keep, sinks, recent, page)
    assert budget.kept % page == 0
    assert 0 < budget.kept <= offered
    assert budget.kept >= offered * keep - 1e-6
    assert budget.kept - page < max(offered * keep, 1) + 1e-6
    assert budget.sinks + budget.recent <= budget.kept
    assert budget.kept + budget.dropped == offered


@given(cases(), st.integers(0, 24))
def test_a_larger_budget_keeps_a_superset(case, more):
    budget, rows = case
    larger = dataclasses.replace(budget, kept=min(budget.offered, budget.kept + more))
    scores = torch.tensor(rows, dtype=torch.float32)
    small, large = (keep_indices(scores, each) for each in (budget, larger))
    for few, many in zip(small.tolist(), large.tolist(), strict=True):
        assert set(few) <= set(many)


@pytest.mark.parametrize("shape", [(2, 9), (2, 10, 1), (10,)])
def test_scores_of_another_shape_are_refused(shape):
    with pytest.raises(CompressionError, match=r"scores must be \[heads, 10\]"):
        keep_indices(torch.zeros(shape), Budget(10, 5, 0, 0))


@given(cases(), st.integers(1, 6))
def test_exact_and_packed_are_what_is_kept_once(case, block):
    plain, rows = case
    budget = code_from(plain, block)
    kept = keep_indices(torch.tensor(rows, dtype=torch.float32), budget)
    exact, coded = coded_rows(kept, budget)
    assert (exact.shape[1], coded.shape[1]) == (budget.exact, budget.coded)
    for row, own, packed in zip(
        kept.tolist(), exact.tolist(), coded.tolist(), strict=True
    ):
        assert own == sorted(own)
        assert packed == sorted(packed)
        assert sorted(own + packed) == row
        always = [*range(plain.sinks), *range(plain.offered)[::-1][: plain.recent]]
        assert set(always) <= set(own), "protected tokens stay exact"
        # As many as whole blocks hold, the earliest behind the sinks.
        assert packed == row[plain.sinks : plain.sinks + len(packed)]
    assert budget.coded % block == 0
    assert 0 <= plain.kept - plain.sinks - plain.recent - budget.coded < block


@given(cases(), st.integers(1, 6), st.integers(0, 20))
def test_counts_of_a_packed_budget_add_up(case, block, code_slots):
    plain = case[0]
    budget = dataclasses.replace(code_from(plain, block), code_slots=code_slots)
    assert budget.exact + budget.coded == plain.kept == budget.kept
    assert budget.kept + budget.dropped == budget.offered
    assert budget.staged == budget.coded + budget.dropped
    assert budget.staged + budget.exact == budget.offered
    assert budget.slots == code_slots + budget.exact


@given(
    st.integers(1, 300),
    st.floats(0.001, 1.0),
    st.integers(0, 64),
    st.integers(0, 64),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 8),
)
def test_packing_whole_blocks_leaves_whole_pages(
    pages, keep, sinks, recent, page, factor
):
    plain = budget_for(pages * page, keep, sinks, recent, page)
    budget = code_from(plain, factor * page)
    assert budget.exact % page == budget.coded % page == 0
    assert budget.exact >= plain.sinks + plain.recent


def test_a_budget_of_protected_tokens_packs_nothing():
    budget = code_from(budget_for(100, 0.3, 10, 20, 1), 4)
    assert (budget.kept, budget.coded, budget.exact) == (30, 0, 30)
    kept = torch.arange(30).expand(2, -1)
    exact, coded = coded_rows(kept, budget)
    assert torch.equal(exact, kept)
    assert coded.shape == (2, 0)
