"""KVzip against an oracle written by hand, the official code's output, invariants."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vericache_sglang.compression import kvzip
from vericache_sglang.compression.base import NOTHING, ModelSpec, Probe, ProbeLayer
from vericache_sglang.compression.budget import Budget, keep_indices
from vericache_sglang.compression.kvzip import KEPT, UNSCORED, KVzip

GOLDEN = Path(__file__).parent / "golden" / "kvzip.npz"
SPEC = ModelSpec(layers=2, query_heads=4, kv_heads=2, head_dim=8, hidden_size=12)


def drawn(spec, tokens, probe, *, layer=0, seed=0):
    """Draw what one layer reads while a probe of so many tokens runs; peaky attention.

    The prompt's keys and values do not depend on the probe.
    """

    def draw(seed, *shape):
        generator = torch.Generator().manual_seed(1000 * seed + layer)
        return 2 * torch.randn(shape, generator=generator)

    return ProbeLayer(
        layer=layer,
        queries=draw(seed + 2, spec.query_heads, probe, spec.head_dim),
        probe_keys=draw(seed + 3, spec.kv_heads, probe, spec.head_dim),
        keys=draw(0, spec.kv_heads, tokens, spec.head_dim),
        values=draw(1, spec.kv_heads, tokens, spec.head_dim),
        hidden=draw(seed + 4, probe, spec.hidden_size),
    )


def scored(selector, layer, tokens=None):
    keys = layer.keys[:, :tokens]
    return selector.scores("r", layer.layer, keys, keys, NOTHING)


def observed(layer, start, stop, weights=None, **options):
    """Run one probe over prompt tokens ``start`` to ``stop - 1``; score them all."""
    selector = KVzip(plus=weights is not None, **options)
    if weights is not None:
        selector.bind(weights)
    selector.open("r")
    probe = Probe(tuple(range(layer.queries.shape[1])), start, stop)
    selector.observe("r", probe, layer)
    return scored(selector, layer)


def oracle(layer, start, stop, sinks, weight=None):
    """Walk heads, queries and keys one by one in float64; [H][stop - start]."""
    heads, _, dim = layer.keys.shape
    query_heads, length, _ = layer.queries.shape
    group = query_heads // heads
    prompt, own = layer.keys.double().tolist(), layer.probe_keys.double().tolist()
    result = [[0.0] * (stop - start) for _ in range(heads)]
    for reader in range(query_heads):
        head = reader // group
        for j in range(length):
            query = layer.queries[reader, j].double().tolist()
            read = [*prompt[head][:sinks], *prompt[head][start:stop]]
            read += own[head][: j + 1]
            logits = [
                math.fsum(a * b for a, b in zip(query, key, strict=True))
                / math.sqrt(dim)
                for key in read
            ]
            top = max(logits)
            whole = math.fsum(math.exp(x - top) for x in logits)
            for t in range(stop - start):
                paid = math.exp(logits[sinks + t] - top) / whole
                if weight is not None:
                    value = layer.values[head, start + t].double().tolist()
                    columns = weight[reader].double().t().tolist()
                    written = [
                        math.fsum(v * w for v, w in zip(value, column, strict=True))
                        for column in columns
                    ]
                    paid *= math.hypot(*written)
                    paid /= math.hypot(*layer.hidden[j].double().tolist())
                result[head][t] = max(result[head][t], paid)
    return torch.tensor(result, dtype=torch.float64)


CASES = {
    "one-chunk": (20, 9, 0, 20, 0, 0),
    "first-of-two": (20, 9, 0, 11, 0, 0),
    "later-chunk": (20, 9, 11, 20, 0, 4),
    "sinks-cut-short": (20, 9, 2, 20, 0, 2),
    "short-prefix": (20, 9, 7, 20, 2, 4),
    "long-prefix": (20, 9, 13, 20, 6, 6),
    "behind-the-prefix": (20, 9, 6, 13, 6, 6),
    "one-query-one-key": (20, 1, 7, 8, 0, 4),
}


@pytest.mark.parametrize("plus", [False, True], ids=["kvzip", "plus"])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_scores_equal_the_oracle(case, heads, plus, make_services):
    tokens, probe, start, stop, prefix, sinks = CASES[case]
    spec = replace(SPEC, query_heads=heads[0], kv_heads=heads[1])
    layer = drawn(spec, tokens, probe, layer=1)
    services = make_services(spec) if plus else None
    scores = observed(layer, start, stop, services, prefix=prefix)
    weight = services.output_weight(1) if plus else None
    wanted = oracle(layer, start, stop, sinks, weight)
    torch.testing.assert_close(
        scores[:, start:stop].double(), wanted, rtol=1e-5, atol=1e-9
    )
    assert (scores[:, :prefix] == KEPT).all()
    assert (scores[:, prefix:start] == UNSCORED).all()
    assert (scores[:, stop:] == UNSCORED).all()


def golden():
    """Return what the official code was given and gave: one probe behind a prefix."""
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    start, stop = int(given["start"]), int(given["end"])
    assert int(given["sink"]) == start
    probe = given["q"].shape[1]
    layer = ProbeLayer(
        layer=0,
        queries=given["q"],
        probe_keys=given["k"][:, -probe:],
        keys=given["k"][:, :-probe],
        values=given["k"][:, :-probe],
    )
    return observed(layer, start, stop, prefix=start)[:, start:stop], given


def test_scores_equal_the_official_codes():
    scores, given = golden()
    torch.testing.assert_close(scores, given["score"], rtol=1e-5, atol=0)


def test_kept_tokens_equal_the_official_codes_with_equal_counts():
    """Their ``pair-uniform`` at 30 %: the same number of tokens in every head."""
    scores, given = golden()
    kept = given["keep_uniform30"]
    chosen = keep_indices(scores, Budget(kept.shape[1], int(kept[0].sum()), 0, 0))
    mask = torch.zeros_like(kept).scatter_(1, chosen, True)
    assert torch.equal(mask, kept)


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_one_chunk_without_prefix_sees_the_models_own_attention(tokens, probe, seed):
    layer = drawn(SPEC, tokens, probe, seed=seed)
    scores = observed(layer, 0, tokens)
    whole = tokens + probe
    weights = torch.nn.functional.scaled_dot_product_attention(
        layer.queries,
        torch.cat([layer.keys, layer.probe_keys], 1).repeat_interleave(2, 0),
        torch.eye(whole).expand(4, whole, whole),
        attn_mask=torch.ones(probe, whole, dtype=torch.bool).tril(tokens),
    )
    wanted = weights[..., :tokens].view(2, 2 * probe, tokens).amax(1)
    torch.testing.assert_close(scores, wanted)
    assert (scores >= 0).all()
    assert (scores <= 1 + 1e-6).all()


@pytest.mark.parametrize("plus", [False, True], ids=["kvzip", "plus"])
def test_permuting_the_query_heads_of_a_group_changes_nothing(plus, make_services):
    spec = replace(SPEC, query_heads=6)
    layer = drawn(spec, 30, 12)
    services = make_services(spec) if plus else None
    scores = observed(layer, 0, 30, services)

    def turned(order):
        if plus:
            services.weights = [w[order] for w in make_services(spec).weights]
        moved = replace(layer, queries=layer.queries[order])
        return observed(moved, 0, 30, services)

    torch.testing.assert_close(turned([2, 0, 1, 4, 5, 3]), scores)
    assert not torch.allclose(turned([3, 1, 2, 0, 4, 5]), scores)


def test_plus_is_linear_in_the_output_weights_and_in_the_values(make_services):
    layer = drawn(SPEC, 30, 12)
    services = make_services(SPEC)
    scores = observed(layer, 0, 30, services)
    services.weights = [3 * w for w in services.weights]
    torch.testing.assert_close(observed(layer, 0, 30, services), 3 * scores)
    louder = replace(layer, values=5 * layer.values, hidden=2 * layer.hidden)
    torch.testing.assert_close(observed(louder, 0, 30, services), 7.5 * scores)


def test_a_query_whose_input_is_zero_has_no_say_in_plus(make_services):
    layer = drawn(SPEC, 30, 12)
    without = replace(layer, hidden=layer.hidden.index_fill(0, torch.tensor(3), 1e30))
    layer.hidden[3] = 0
    scores = observed(layer, 0, 30, make_services(SPEC))
    wanted = observed(without, 0, 30, make_services(SPEC))
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(scores, wanted)


@pytest.mark.parametrize("plus", [False, True], ids=["kvzip", "plus"])
@pytest.mark.parametrize("elements", [1, 7 * 4 * 90, 2**30])
def test_blocks_of_any_size_give_the_same_scores(
    elements, plus, monkeypatch, make_services
):
    layer = drawn(SPEC, 50, 40)
    services = make_services(SPEC) if plus else None
    scores = observed(layer, 10, 50, services)
    monkeypatch.setattr(kvzip, "CACHED_ELEMENTS", elements)
    torch.testing.assert_close(observed(layer, 10, 50, services), scores)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that torch makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_no_tensor_holds_a_whole_probes_attention(monkeypatch):
    spec = replace(SPEC, query_heads=8, kv_heads=1, head_dim=2)
    layer = drawn(spec, 400, 500)
    monkeypatch.setattr(kvzip, "CACHED_ELEMENTS", 2**15)
    with Largest() as largest:
        observed(layer, 0, 400)
    whole = 8 * 500 * 900
    assert 2**13 < largest.elements <= 2**15 < whole


def test_half_precision_chooses_nearly_the_same():
    spec = replace(SPEC, query_heads=8, head_dim=32)
    layer = drawn(spec, 600, 300)
    half = replace(
        layer,
        queries=layer.queries.bfloat16(),
        probe_keys=layer.probe_keys.bfloat16(),
        keys=layer.keys.bfloat16(),
    )
    budget = Budget(600, 300, 0, 0)
    exact = keep_indices(observed(layer, 0, 600), budget)
    rounded = keep_indices(observed(half, 0, 600), budget)
    for a, b in zip(exact.tolist(), rounded.tolist(), strict=True):
        assert len(set(a) & set(b)) / len(set(a) | set(b)) >= 0.9


def test_chunks_score_as_the_oracle_says(make_services):
    selector = KVzip(chunk=8)
    selector.bind(make_services(SPEC))
    selector.open("r")
    wanted = []
    for i, probe in enumerate(selector.probes("r", range(21))):
        layer = drawn(SPEC, 21, 10, seed=i)
        selector.observe("r", probe, layer)
        sinks = 0 if i == 0 else 4
        wanted.append(oracle(layer, probe.start, probe.stop, sinks))
    scores = scored(selector, layer).double()
    torch.testing.assert_close(scores, torch.cat(wanted, 1), rtol=1e-5, atol=1e-9)


def test_heads_may_lie_inside_tokens_as_in_a_pool(make_services):
    layer = drawn(SPEC, 24, 10)
    names = ("queries", "probe_keys", "keys", "values")
    pool = {
        name: getattr(layer, name).transpose(0, 1).contiguous().transpose(0, 1)
        for name in names
    }
    assert not pool["queries"].is_contiguous()
    there = observed(replace(layer, **pool), 5, 24, make_services(SPEC))
    assert torch.equal(there, observed(layer, 5, 24, make_services(SPEC)))


def test_nothing_observed_is_changed(make_services):
    layer = drawn(SPEC, 24, 10)
    same = drawn(SPEC, 24, 10)
    scores = observed(layer, 0, 24, make_services(SPEC))
    scores.zero_()
    for name in ("queries", "probe_keys", "keys", "values", "hidden"):
        assert torch.equal(getattr(layer, name), getattr(same, name)), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("plus", [False, True], ids=["kvzip", "plus"])
def test_a_gpu_scores_as_the_cpu(plus, make_services):
    layer = drawn(SPEC, 300, 150)
    names = ("queries", "probe_keys", "keys", "values", "hidden")
    moved = replace(layer, **{name: getattr(layer, name).cuda() for name in names})
    services = make_services(SPEC) if plus else None
    scores = observed(layer, 100, 300, services, prefix=5)
    if plus:
        services.weights = [w.cuda() for w in services.weights]
    there = observed(moved, 100, 300, services, prefix=5)
    torch.testing.assert_close(there.cpu(), scores, rtol=1e-4, atol=1e-6)
