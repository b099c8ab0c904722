"""Expected attention against an oracle written by hand, and its invariants."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.compression.base import NOTHING, ModelSpec, Step
from vericache_sglang.compression.codecs.rope import Rope
from vericache_sglang.compression.expected_attention import (
    ExpectedAttention,
    Statistics,
)
from vericache_sglang.errors import CompressionError

FREQUENCIES = [1.0, 0.3, 0.02, 0.001]


def turned(vector, position, frequencies=FREQUENCIES, amplitude=1.0):
    """Rotate one vector as complex numbers, in float64; the rest stays."""
    half = len(frequencies)
    pairs = np.array(vector[:half]) + 1j * np.array(vector[half : 2 * half])
    pairs = amplitude * pairs * np.exp(1j * position * np.array(frequencies))
    return [*pairs.real, *pairs.imag, *vector[2 * half :]]


class Prompt:
    """Random prompt: queries before and after RoPE, keys, values; peaky attention."""

    def __init__(self, *, tokens=40, heads=(4, 2), dim=8, seed=0, amplitude=1.0):
        draw = np.random.default_rng(seed)
        query_heads, kv_heads = heads
        # A mean, and a covariance that is not round: else most of the formula is mute.
        self.plain = draw.normal(size=(query_heads, 1, dim)) + np.einsum(
            "htd,hde->hte",
            draw.normal(size=(query_heads, tokens, dim)),
            draw.normal(size=(query_heads, dim, dim)),
        )
        self.amplitude = amplitude
        self.queries = torch.tensor(
            [
                [turned(row, t, amplitude=amplitude) for t, row in enumerate(head)]
                for head in self.plain.tolist()
            ],
            dtype=torch.float32,
        )
        self.keys = torch.from_numpy(draw.normal(size=(kv_heads, tokens, dim))).float()
        self.values = torch.from_numpy(
            draw.normal(size=(kv_heads, tokens, dim))
        ).float()
        query_heads, self.tokens, dim = self.queries.shape
        self.spec = ModelSpec(
            layers=1, query_heads=query_heads, kv_heads=kv_heads, head_dim=dim
        )


@pytest.fixture
def score(make_services):
    """Return a function from a prompt and options to scores."""

    def run(prompt, *, cuts=(), start=0, offered=None, **options):
        selector = bound(make_services, prompt, **options)
        selector.open("r")
        feed(selector, prompt, cuts, start=start)
        return selector.scores(
            "r", 0, prompt.keys[:, :offered], prompt.values[:, :offered], NOTHING
        )

    return run


def bound(make_services, prompt, **options):
    selector = ExpectedAttention(**options)
    services = make_services(prompt.spec)
    services.rope = Rope(torch.tensor(FREQUENCIES), prompt.amplitude)
    selector.bind(services)
    return selector


def feed(selector, prompt, cuts=(), *, start=0, rid="r"):
    edges = [start, *sorted(c for c in cuts if start < c < prompt.tokens)]
    for begin, end in zip(edges, [*edges[1:], prompt.tokens], strict=True):
        rows = prompt.queries[:, begin:end]
        assert (
            selector.update(Step(rid=rid, layer=0, start=begin, queries=rows)) is None
        )


DEFAULTS = {
    "start": 0,
    "offered": None,
    "future": 512,
    "sinks": 4,
    "covariance": True,
    "value_norm": True,
    "epsilon": 0.0,
}


def oracle(prompt, **options):
    """Walk heads, tokens and future positions one by one, in float64."""
    chosen = {**DEFAULTS, **options}
    start, future, sinks = chosen["start"], chosen["future"], chosen["sinks"]
    query_heads, tokens, dim = prompt.plain.shape
    kv_heads = len(prompt.keys)
    offered = chosen["offered"] or tokens
    units = np.eye(dim).tolist()
    rotation = np.zeros((dim, dim))  # column i is the mean image of unit vector i
    for p in range(tokens, tokens + future):
        for i in range(dim):
            image = turned(units[i], p, amplitude=prompt.amplitude)
            rotation[:, i] += np.array(image) / future
    group = query_heads // kv_heads
    result = np.zeros((kv_heads, offered))
    for q in range(query_heads):
        counted = prompt.plain[q, max(start, sinks) :]
        mean = sum(counted) / len(counted)
        spread = sum(np.outer(x - mean, x - mean) for x in counted) / len(counted)
        ahead = rotation @ mean
        wide = rotation @ spread @ rotation.T
        keys = prompt.keys[q // group].double().numpy()
        weights = []
        for t in range(sinks, offered):
            z = ahead @ keys[t] / math.sqrt(dim)
            if chosen["covariance"]:
                z += keys[t] @ wide @ keys[t] / (2 * dim)
            weights.append(math.exp(z))
        result[q // group, sinks:] += np.array(weights) / sum(weights) / group
    if chosen["value_norm"]:
        values = prompt.values.double().numpy()
        for head in range(kv_heads):
            for t in range(sinks, offered):
                length = math.sqrt(sum(x * x for x in values[head, t]))
                result[head, t] = (result[head, t] + chosen["epsilon"]) * length
    result[:, :sinks] = result.max() + 1
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"covariance": False},
        {"value_norm": False},
        {"epsilon": 0.01},
        {"sinks": 0, "future": 1},
        {"sinks": 7, "future": 37},
        {"offered": 32},
        {"start": 16},
        {"start": 2},
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("cuts", [(), (3, 16, 17, 30)], ids=["whole", "cut"])
def test_scores_equal_the_oracle(heads, options, cuts, score):
    prompt = Prompt(heads=heads)
    scores = score(prompt, cuts=cuts, **options)
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(
        scores.numpy(), oracle(prompt, **options), rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("dim", [8, 10], ids=["all", "partly"])
def test_scaled_and_partial_rotations_equal_the_oracle(dim, score):
    """YaRN's amplitude is in the future rotation, and not in the statistics."""
    prompt = Prompt(dim=dim, amplitude=1.2)
    np.testing.assert_allclose(score(prompt).numpy(), oracle(prompt), rtol=1e-5)


@given(
    st.sets(st.integers(1, 79)), st.floats(0, 100), st.booleans(), st.integers(0, 2**31)
)
def test_batches_of_any_size_give_the_statistics_of_one_pass(cuts, offset, wide, seed):
    """The offset is far more than the spread: sums of squares would lose it."""
    draw = torch.Generator().manual_seed(seed)
    queries = offset + torch.randn(3, 80, 8, generator=draw)
    known = Statistics(torch.zeros(3, 8), torch.zeros(3, 8, 8) if wide else None, end=0)
    for part in queries.tensor_split(sorted(cuts), dim=1):
        known.add(part)
    exact = queries.double()
    assert known.count == 80
    torch.testing.assert_close(known.mean.double(), exact.mean(1), rtol=1e-5, atol=1e-5)
    if wide:
        wanted = torch.stack([torch.cov(x.t(), correction=0) for x in exact])
        spread = known.comoment.double() / 80
        torch.testing.assert_close(spread, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_a_prompt_of_hardly_more_than_sinks_has_scores(tokens, score):
    scores = score(Prompt(tokens=tokens))
    assert scores.shape == (2, tokens)
    assert torch.isfinite(scores).all()


def test_a_selector_nobody_bound_is_refused():
    prompt = Prompt()
    selector = ExpectedAttention()
    selector.open("r")
    with pytest.raises(CompressionError, match="used before bind"):
        feed(selector, prompt)
