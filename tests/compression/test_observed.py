"""Accumulated attention against an oracle written by hand, and its invariants."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.compression.base import NOTHING, Step
from vericache_sglang.compression.observed import Observed, Sample


def drawn(heads=(4, 2), tokens=24, dim=4, seed=0):
    """Draw post-RoPE queries [Hq, T, D] and keys [H, T, D]; peaky attention."""
    generator = torch.Generator().manual_seed(seed)
    queries = 2 * torch.randn(heads[0], tokens, dim, generator=generator)
    return queries, 2 * torch.randn(heads[1], tokens, dim, generator=generator)


def score(rows, keys, *, cuts=(), start=0, **options):
    selector = Observed(**options)
    selector.open("r")
    feed(selector, rows, cuts, start)
    return selector.scores("r", 0, keys, keys, NOTHING)


def feed(selector, queries, cuts=(), start=0):
    tokens = queries.shape[1]
    edges = [start, *sorted(c for c in cuts if start < c < tokens)]
    for begin, end in zip(edges, [*edges[1:], tokens], strict=True):
        step = Step(rid="r", layer=0, start=begin, queries=queries[:, begin:end])
        assert selector.update(step) is None


def voting(start, end, most):
    """List the positions that vote: every one, every second, every fourth, ..."""
    stride = 1
    while True:
        chosen = [p for p in range(start, end) if p % stride == 0]
        if len(chosen) <= most:
            return chosen, stride
        stride *= 2


def oracle(queries, keys, *, start=0, most=512, mean=False):
    """Walk voting queries and keys one by one in float64; None for the unseen."""
    query_heads, end, dim = queries.shape
    heads, tokens, _ = keys.shape
    chosen, stride = voting(start, end, most)
    group = query_heads // heads
    result = [[0.0] * tokens for _ in range(heads)]
    for q in range(query_heads):
        rows = keys[q // group].tolist()
        for p in chosen:
            query = queries[q, p].tolist()
            logits = [
                math.fsum(a * b for a, b in zip(query, row, strict=True))
                / math.sqrt(dim)
                for row in rows[: p + 1]
            ]
            whole = math.fsum(math.exp(x) for x in logits)
            for t, x in enumerate(logits):
                result[q // group][t] += math.exp(x) / whole * stride / group
    for row in result:
        for t in range(tokens):
            sighted = sum(p >= t for p in chosen)
            if mean and sighted:
                row[t] /= sighted * stride
            if not sighted:
                row[t] = None
    return result


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize(
    ("start", "offered", "most"),
    [
        (0, 24, 512),
        (0, 20, 512),
        (0, 24, 24),
        (0, 24, 23),
        (0, 24, 5),
        (0, 24, 1),
        (9, 24, 512),
        (9, 24, 4),
        (23, 20, 1),
    ],
)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("cuts", [(), (1, 8, 15)], ids=["whole", "cut"])
def test_scores_equal_the_oracle(heads, cuts, start, offered, most, mean):
    queries, keys = drawn(heads)
    keys = keys[:, :offered]
    scores = score(queries, keys, cuts=cuts, start=start, queries=most, mean=mean)
    wanted = oracle(queries.double(), keys.double(), start=start, most=most, mean=mean)
    for row, expected in zip(scores.tolist(), wanted, strict=True):
        seen = [x for x in expected if x is not None]
        assert row[: len(seen)] == pytest.approx(seen, rel=1e-5, abs=1e-9)
        above = [max(row[: len(seen)], default=0), *row[len(seen) :]]
        assert above == sorted(set(above)), "the unseen rank above all, latest first"


@given(st.integers(1, 200), st.integers(0, 100), st.integers(1, 70), st.data())
def test_the_sample_depends_on_no_cut_and_stays_small(tokens, start, most, data):
    queries = torch.arange(start, start + tokens).float()[None, :, None]
    cuts = data.draw(st.sets(st.integers(0, tokens)))
    sample = Sample(start, start, 1, queries[:, :0])
    for part in queries.tensor_split(sorted(cuts), dim=1):
        sample = sample.extended(part, most)
    wanted, stride = voting(start, start + tokens, most)
    assert sample.rows.flatten().tolist() == wanted
    assert sample.stride == stride
    assert sample.first == wanted[0]
    assert len(wanted) <= most


def test_all_queries_together_hand_out_one_vote_each():
    queries, keys = drawn()
    scores = score(queries, keys)
    torch.testing.assert_close(scores.sum(1), torch.full((2,), 24.0))


def test_a_sample_of_equal_queries_is_off_by_one_stride_at_most():
    """The weight of a key falls as keys join in: each vote bounds a stride of them."""
    queries, keys = drawn(heads=(2, 2), tokens=256)
    queries = queries[:, :1].expand(-1, 256, -1).contiguous()
    whole, part = score(queries, keys), score(queries, keys, queries=64)
    weights = (keys @ queries[:, 0, :, None])[..., 0].div(2).exp()
    first_vote = weights / weights.cumsum(1)
    off = (part - whole).abs()[:, :253]
    assert (off <= 4 * first_vote[:, :253] + 1e-4).all()
    assert (off > 1e-4).any(), "a sample is not the whole"


def test_the_runtimes_queries_are_copied():
    queries, keys = drawn()
    wanted = score(queries, keys)
    selector = Observed()
    selector.open("r")
    feed(selector, queries)
    queries.zero_()
    assert torch.equal(selector.scores("r", 0, keys, keys, NOTHING), wanted)
