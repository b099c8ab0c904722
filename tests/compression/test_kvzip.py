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
from vericache_sglang.errors import CompressionError

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


def test_a_query_whose_input_is_zero_has_no_say_in_plus(make_services):
    layer = drawn(SPEC, 30, 12)
    without = replace(layer, hidden=layer.hidden.index_fill(0, torch.tensor(3), 1e30))
    layer.hidden[3] = 0
    scores = observed(layer, 0, 30, make_services(SPEC))
    wanted = observed(without, 0, 30, make_services(SPEC))
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(scores, wanted)


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


# -- probes, and what a request's scores live through ----------------------------------


def test_probes_ask_for_the_prompt_chunk_by_chunk(make_services):
    services = make_services(SPEC)
    selector = KVzip(chunk=20, prefix=3, suffix="<turn>")
    selector.bind(services)
    selector.open("r")
    prompt = list(range(1000, 1047))
    first, second, third = selector.probes("r", prompt)
    whole = services.encode("\n\nRepeat the previous context exactly.")
    part = services.encode(
        "\n\nRepeat the part of the previous context exactly, starting with "
    )
    turn = services.encode("<turn>")
    assert first == Probe((*whole, *turn, *prompt[3:23]), 3, 23)
    assert second == Probe((*part, *prompt[15:23], *turn, *prompt[23:43]), 23, 43)
    assert third == Probe((*part, *prompt[35:43], *turn, *prompt[43:]), 43, 47)


def test_a_chunk_shorter_than_the_lead_lends_all_its_tokens(make_services):
    services = make_services(SPEC)
    selector = KVzip(chunk=3, prefix=1)
    selector.bind(services)
    _, second = selector.probes("r", [10, 11, 12, 13, 14])
    assert second.tokens[-5:] == (11, 12, 13, services.encode("\n")[0], 14)
    assert (second.start, second.stop) == (4, 5)


@given(st.integers(0, 200), st.integers(1, 60), st.integers(0, 40))
def test_probes_cover_what_follows_the_prefix_once(length, chunk, prefix):
    selector = KVzip(chunk=chunk, prefix=prefix)
    selector.bind(EmptyServices())
    prompt = list(range(length))
    probes = selector.probes("r", prompt)
    covered = [t for probe in probes for t in range(probe.start, probe.stop)]
    assert covered == prompt[prefix:]
    for probe in probes:
        assert 1 <= probe.stop - probe.start <= chunk
        size = probe.stop - probe.start
        assert probe.tokens[-size:] == tuple(prompt[probe.start : probe.stop])


class EmptyServices:
    """A tokenizer that knows no text: probes are prompt tokens alone."""

    spec = SPEC

    def encode(self, text):
        return []


@given(st.permutations(range(4)), st.sets(st.integers(0, 3)))
@settings(max_examples=30, deadline=None)
def test_probes_in_any_order_and_repeated_score_as_defined(order, again):
    """Each chunk's scores are its probe's alone, whatever else was observed."""
    selector = KVzip(chunk=8, prefix=2)
    selector.bind(EmptyServices())
    selector.open("r")
    probes = selector.probes("r", range(31))
    assert len(probes) == 4
    layers = [[drawn(SPEC, 31, 10, layer=n, seed=i) for n in (0, 1)] for i in range(4)]
    for i in [*order, *again]:
        for layer in layers[i]:
            selector.observe("r", probes[i], layer)
    for n in (0, 1):
        scores = scored(selector, layers[0][n])
        assert (scores[:, :2] == KEPT).all()
        for i, probe in enumerate(probes):
            alone = observed(layers[i][n], probe.start, probe.stop, prefix=2)
            own = slice(probe.start, probe.stop)
            assert torch.equal(scores[:, own], alone[:, own])


def test_a_token_no_probe_reached_goes_first_and_the_prefix_never():
    selector = KVzip(prefix=3)
    selector.open("r")
    layer = drawn(SPEC, 24, 10)
    selector.observe("r", Probe((), 3, 12), layer)
    scores = scored(selector, layer)
    assert torch.isfinite(scores).all()
    chosen = keep_indices(scores, Budget(24, 12, 0, 0))
    assert chosen.tolist() == [list(range(12))] * 2
    assert keep_indices(scores, Budget(24, 3, 0, 0)).tolist() == [[0, 1, 2]] * 2
    unseen = selector.scores("r", 1, layer.keys, layer.values, NOTHING)
    assert (unseen[:, :3] == KEPT).all()
    assert (unseen[:, 3:] == UNSCORED).all()


def test_scores_may_be_asked_for_fewer_tokens_or_more_than_were_seen():
    selector = KVzip()
    selector.open("r")
    layer = drawn(SPEC, 24, 10)
    whole = observed(layer, 0, 24)
    shown = replace(layer, keys=layer.keys[:, :20], values=layer.values[:, :20])
    selector.observe("r", Probe((), 20, 24), shown)
    assert (scored(selector, layer) == UNSCORED).all(), "no key of that chunk is there"
    selector.observe("r", Probe((), 12, 24), shown)
    short = scored(selector, layer)
    assert torch.equal(short[:, :20], observed(shown, 12, 20))
    assert (short[:, 20:] == UNSCORED).all()
    selector.observe("r", Probe((), 0, 12), layer)
    assert torch.equal(scored(selector, layer)[:, 12:], short[:, 12:])
    selector.observe("r", Probe((), 0, 24), layer)
    assert torch.equal(scored(selector, layer), whole)
    assert torch.equal(scored(selector, layer, 16), whole[:, :16])


def test_scores_belong_to_one_open_request():
    selector = KVzip()
    layer, other = drawn(SPEC, 24, 10), drawn(SPEC, 24, 10, seed=7)
    probe = Probe((), 0, 24)
    selector.open("r")
    selector.open("s")
    selector.observe("r", probe, layer)
    selector.observe("s", probe, other)
    scores = scored(selector, layer)
    assert torch.equal(scores, observed(layer, 0, 24))
    given_out = scored(selector, layer)
    given_out.zero_()
    assert torch.equal(scored(selector, layer), scores), "scores are not the state"
    selector.close("s")
    assert torch.equal(scored(selector, layer), scores)
    selector.close("r")
    selector.close("r")
    selector.observe("r", probe, layer)
    assert (scored(selector, layer) == UNSCORED).all(), "aborted while its probe ran"
    selector.open("r")
    assert (scored(selector, layer) == UNSCORED).all()
    selector.observe("r", probe, layer)
    selector.open("r")
    assert (scored(selector, layer) == UNSCORED).all(), "open begins anew"


def test_only_plus_asks_for_attention_inputs():
    plain, plus = KVzip(), KVzip(plus=True)
    assert plain.needs.probes
    assert not plain.needs.hidden
    assert plus.needs == replace(plain.needs, hidden=True)
    assert KVzip.needs == plain.needs


def test_what_needs_the_model_is_refused_before_bind():
    with pytest.raises(CompressionError, match=r"probes\(\) before bind\(\)"):
        KVzip().probes("r", [1, 2, 3])
    selector = KVzip(plus=True)
    selector.open("r")
    with pytest.raises(CompressionError, match=r"plus before bind\(\)"):
        selector.observe("r", Probe((), 0, 24), drawn(SPEC, 24, 10))


def test_plus_without_attention_inputs_is_refused(make_services):
    layer = replace(drawn(SPEC, 24, 10, layer=1), hidden=None)
    selector = KVzip(plus=True)
    selector.bind(make_services(SPEC))
    selector.open("r")
    with pytest.raises(CompressionError, match=r"ProbeLayer.hidden of layer 1 is None"):
        selector.observe("r", Probe((), 0, 24), layer)
