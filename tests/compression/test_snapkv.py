"""SnapKV against an oracle written by hand, the official code's output, invariants."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.compression.base import QueryTail, Seen
from vericache_sglang.compression.budget import Budget, keep_indices
from vericache_sglang.compression.snapkv import SnapKV
from vericache_sglang.errors import CompressionError

GOLDEN = Path(__file__).parent / "golden" / "snapkv.npz"


def drawn(shape, prompt, window, *, seed=0, offered=None):
    """Draw keys [H, T, D] and the tail of a prompt's queries; peaky attention."""
    query_heads, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    keys = 2 * torch.randn(heads, prompt, dim, generator=generator)
    queries = 2 * torch.randn(query_heads, prompt, dim, generator=generator)
    tail = QueryTail(queries[:, prompt - window :], prompt)
    return keys[:, :offered], tail


def score(keys, tail, pooling=5):
    return SnapKV(pooling=pooling).scores("r", 0, keys, keys, Seen(tail=tail))


def oracle(keys, tail, pooling):
    """Walk queries and keys one by one in float64; None for the window."""
    heads, tokens, dim = keys.shape
    query_heads, window, _ = tail.rows.shape
    group, start = query_heads // heads, tail.end - window
    prefix = min(tokens, start)
    result = []
    for head in range(heads):
        pooled = [0.0] * prefix
        for member in range(group):
            mean = [0.0] * tokens
            for i in range(window):
                query = tail.rows[head * group + member, i].tolist()
                seen = [
                    math.fsum(a * b for a, b in zip(query, key, strict=True))
                    / math.sqrt(dim)
                    for key in keys[head, : start + i + 1].tolist()
                ]
                top = max(seen)
                whole = math.fsum(math.exp(x - top) for x in seen)
                for t, x in enumerate(seen):
                    mean[t] += math.exp(x - top) / whole / window
            reach = pooling // 2
            for t in range(prefix):
                near = range(max(0, t - reach), min(prefix, t + reach + 1))
                pooled[t] += sum(mean[u] for u in near) / pooling / group
        result.append([*pooled, *[None] * (tokens - prefix)])
    return result


@pytest.mark.parametrize("pooling", [1, 5, 7])
@pytest.mark.parametrize(
    ("prompt", "window", "offered"),
    [(40, 8, 40), (40, 1, 40), (40, 8, 37), (40, 8, 20), (40, 38, 40), (3, 2, 3)],
    ids=["whole", "one-query", "tail", "long-tail", "little-prefix", "short"],
)
@pytest.mark.parametrize(("query_heads", "heads"), [(4, 2), (3, 3), (6, 1)])
def test_scores_equal_the_oracle(query_heads, heads, prompt, window, offered, pooling):
    keys, tail = drawn((query_heads, heads, 8), prompt, window, offered=offered)
    scores = score(keys, tail, pooling)
    wanted = oracle(keys.double(), QueryTail(tail.rows.double(), tail.end), pooling)
    for row, expected in zip(scores.tolist(), wanted, strict=True):
        for t, value in enumerate(expected):
            if value is None:
                assert row[t] > 1, "the window is kept before anything else"
            else:
                assert row[t] == pytest.approx(value, rel=1e-5, abs=1e-9)


def test_kept_tokens_equal_the_official_codes():
    """Their output without groups: average pooling of 5, window 16, 80 tokens kept."""
    with np.load(GOLDEN, allow_pickle=False) as golden:
        q, k, kept = (torch.from_numpy(golden[n]) for n in ("q", "k", "kept_avg5"))
    tail = QueryTail(q, k.shape[1])
    chosen = keep_indices(score(k, tail), Budget(k.shape[1], kept.shape[1], 0, 0))
    assert torch.equal(chosen, kept)


@given(
    st.integers(1, 60), st.integers(1, 40), st.integers(0, 30), st.integers(0, 2**31)
)
def test_the_window_is_kept_latest_first(prompt, window, missing, seed):
    window = min(window, prompt)
    offered = max(1, prompt - missing)
    keys, tail = drawn((4, 2, 8), prompt, window, seed=seed, offered=offered)
    scores = score(keys, tail)
    inside = max(0, offered - (prompt - window))
    assert scores.shape == (2, offered)
    assert torch.isfinite(scores).all()
    for kept in {1, (offered + 1) // 2, offered}:
        chosen = keep_indices(scores, Budget(offered, kept, 0, 0))
        latest = range(offered - min(kept, inside), offered)
        assert all(set(latest) <= set(row) for row in chosen.tolist())


def test_missing_queries_are_refused():
    keys, _ = drawn((2, 2, 8), 10, 2)
    with pytest.raises(CompressionError, match="last queries are missing"):
        score(keys, None)
