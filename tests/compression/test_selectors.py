"""The selectors by name, a third party's, and what single ones of ours keep."""

from pathlib import Path

import pytest
import torch

from vericache_sglang.compression.base import NOTHING, ModelSpec
from vericache_sglang.compression.budget import Budget, keep_indices
from vericache_sglang.compression.catalog import create_compressor

THEIRS = ("test-nan", "test-random")
THIRD_PARTY = Path(__file__).parents[1] / "compressors"
SPEC = ModelSpec(layers=2, query_heads=6, kv_heads=3, head_dim=8)


@pytest.fixture(autouse=True)
def third_party(monkeypatch):
    monkeypatch.syspath_prepend(str(THIRD_PARTY))


def keys(tokens=40, seed=0):
    return torch.randn(3, tokens, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("kept", [1, 7, 40])
def test_whatever_a_third_party_returns_every_head_keeps_as_many(
    name, kept, make_services
):
    selector = create_compressor(name, seed=3).selector
    selector.bind(make_services(SPEC))
    selector.open("r")
    scores = selector.scores("r", 0, keys(), keys(seed=1), NOTHING)
    index = keep_indices(scores, Budget(40, kept, min(2, kept), 0))
    assert index.shape == (3, kept)
    assert (index.diff(dim=1) > 0).all(), "rows must be ascending and unique"
    assert index.min() >= 0
    assert index.max() < 40
    selector.close("r")


@pytest.mark.parametrize(
    ("tokens", "kept", "sinks"),
    [(10, 6, 4), (10, 10, 4), (10, 4, 4), (10, 1, 1), (5, 5, 2)],
    ids=["middle-dropped", "all-kept", "sinks-only", "one-token", "short"],
)
def test_recency_keeps_sinks_and_tail(tokens, kept, sinks):
    k = keys(tokens)
    scores = create_compressor("recency", 0).selector.scores("r", 0, k, k, NOTHING)
    index = keep_indices(scores, Budget(tokens, kept, sinks, 0))
    # Walk the prompt token by token; shares no code with the selector.
    wanted = [t for t in range(tokens) if t < sinks or tokens - t <= kept - sinks]
    assert index.tolist() == [wanted] * 3


def test_keynorm_keeps_the_smallest_keys():
    norms = torch.tensor([5.0, 1.0, 4.0, 0.5, 3.0, 2.0])
    k = torch.ones(1, 6, 4) * norms[None, :, None]
    scores = create_compressor("keynorm", 0).selector.scores("r", 0, k, k, NOTHING)
    index = keep_indices(scores, Budget(6, 3, 0, 0))
    assert index.tolist() == [[1, 3, 5]]


def random_scores(seed=3, rid="r", layer=0):
    k = keys()
    return create_compressor("random", seed).selector.scores(rid, layer, k, k, NOTHING)


def test_random_scores_are_fixed_by_seed_request_and_layer():
    """The numbers were taken from another process: no salted hash is in them."""
    scores = random_scores()
    index = keep_indices(scores, Budget(40, 4, 0, 0))
    assert index.tolist() == [[1, 11, 22, 39], [9, 10, 12, 31], [4, 22, 27, 33]]
    assert torch.equal(random_scores(), scores)
    others = [{"seed": 4}, {"rid": "s"}, {"layer": 1}, {"seed": 30, "layer": 10}]
    draws = [scores, *(random_scores(**other) for other in others)]
    heads = {tuple(row) for draw in draws for row in draw.tolist()}
    assert len(heads) == 3 * len(draws), "another draw per request, layer and head"


def test_random_scores_prefer_no_position():
    """1200 draws of 40 tokens: the mean rank of a place is 19.5, give or take 0.33."""
    draws = torch.cat([random_scores(rid=f"r{i}") for i in range(400)])
    assert 0 <= draws.min() < 0.001
    assert 0.999 < draws.max() < 1
    ranks = draws.argsort(dim=1).argsort(dim=1).double().mean(0)
    assert ((ranks - 19.5).abs() < 5 * 0.34).all()
