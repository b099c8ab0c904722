"""KVzip's probes, what a request's scores live through, and what is refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.compression.base import NOTHING, ModelSpec, Probe, ProbeLayer
from vericache_sglang.compression.budget import Budget, keep_indices
from vericache_sglang.compression.kvzip import KEPT, UNSCORED, KVzip
from vericache_sglang.errors import CompressionError

SPEC = ModelSpec(layers=2, query_heads=4, kv_heads=2, head_dim=8, hidden_size=12)


def drawn(tokens=24, *, layer=0, seed=0):
    """Draw what one layer reads while a probe of ten tokens runs."""
    generator = torch.Generator().manual_seed(1000 * seed + layer)

    def draw(*shape):
        return 2 * torch.randn(shape, generator=generator)

    keys, values = draw(2, tokens, 8), draw(2, tokens, 8)
    return ProbeLayer(
        layer=layer,
        queries=draw(4, 10, 8),
        probe_keys=draw(2, 10, 8),
        keys=keys,
        values=values,
        hidden=draw(10, 12),
    )


def scored(selector, layer, tokens=None):
    keys = layer.keys[:, :tokens]
    return selector.scores("r", layer.layer, keys, keys, NOTHING)


def observed(layer, start, stop, **options):
    """Run one probe of a request of its own; score all its tokens."""
    selector = KVzip(**options)
    selector.open("r")
    selector.observe("r", Probe((), start, stop), layer)
    return scored(selector, layer)


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
@settings(max_examples=60, deadline=None)
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
    layers = [[drawn(31, layer=n, seed=i) for n in (0, 1)] for i in range(4)]
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
    layer = drawn()
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
    layer = drawn()
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
    layer, other = drawn(), drawn(seed=7)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "chunk must be >= 1 token, got 0"),
        ({"chunk": -5}, "chunk must be >= 1 token, got -5"),
        ({"prefix": -1}, "prefix must be >= 0 tokens, got -1"),
    ],
)
def test_options_out_of_bounds_are_refused(options, message):
    with pytest.raises(CompressionError, match=message):
        KVzip(**options)


def test_what_needs_the_model_is_refused_before_bind():
    with pytest.raises(CompressionError, match=r"probes\(\) before bind\(\)"):
        KVzip().probes("r", [1, 2, 3])
    selector = KVzip(plus=True)
    selector.open("r")
    with pytest.raises(CompressionError, match=r"plus before bind\(\)"):
        selector.observe("r", Probe((), 0, 24), drawn())


def test_plus_without_attention_inputs_is_refused(make_services):
    layer = replace(drawn(layer=1), hidden=None)
    selector = KVzip(plus=True)
    selector.bind(make_services(SPEC))
    selector.open("r")
    with pytest.raises(CompressionError, match=r"ProbeLayer.hidden of layer 1 is None"):
        selector.observe("r", Probe((), 0, 24), layer)
