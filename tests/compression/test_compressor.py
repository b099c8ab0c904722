"""Selector times codec: what is dropped, packed, brought back, and refused."""

from dataclasses import replace
from itertools import cycle, pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import (
    SELECTORS,
    ModelSpec,
    Needs,
    ProbeLayer,
    QueryTail,
    Seen,
    Selector,
    Step,
)
from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.compression.codecs.rotatekv_tables import write_tables
from vericache_sglang.compression.compressed import Entries
from vericache_sglang.compression.compressor import Compressor
from vericache_sglang.errors import CompressionError

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INTEGERS = {2: torch.int16, 4: torch.int32}
NEED_ARTIFACTS = {"kvzap"}
DROPPING = [*sorted(set(SELECTORS.names()) - NEED_ARTIFACTS), ""]
PACKING = ["", "kivi:bits=3,group=8,window=16", "split-planes:block=4", "turboquant"]
PAIRS = ["+".join(filter(None, pair)) for pair in zip(DROPPING, cycle(PACKING))]
PAIRS += [*DROPPING[:-1], *(f"snapkv+{line}" for line in PACKING[1:]), *PACKING[1:]]
GROUP = 2
LENIENT = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


class Marked(Selector):
    """Scores given by a function of the keys; says what it saw."""

    about = About(scenarios=("long-context",))

    def __init__(self, align=1, share=None, shape=None):
        super().__init__()
        self.needs = Needs(token_align=align)
        self.share, self.shape, self.shown, self.requests = share, shape, [], []

    def open(self, rid):
        self.requests.append(("open", rid))

    def close(self, rid):
        self.requests.append(("close", rid))

    def keep_share(self, noted):
        return self.share

    def scores(self, rid, layer, keys, values, seen):
        self.shown.append((keys, values, seen))
        return torch.zeros(self.shape or keys.shape[:2])


def marked(codec=None, **options):
    return Compressor(line="marked", selector=Marked(**options), codec=codec)


def drawn(shape, dtype=torch.float32, seed=0):
    """Draw keys and values of every layer: [(K, V)] with K and V of ``shape``[1:]."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, *shape, generator=generator).to(dtype)
    return list(zip(kv[0], kv[1], strict=True))


def bits_of(entries):
    return entries.contiguous().view(INTEGERS[entries.element_size()])


def spec_of(kv):
    heads, _, dim = kv[0][0].shape
    return ModelSpec(
        layers=len(kv),
        query_heads=GROUP * heads,
        kv_heads=heads,
        head_dim=dim,
        hidden_size=12,
    )


def collected(compressor, kv, rid):
    """Show a compressor what a model would, and return ``seen``."""
    spec, needs = spec_of(kv), compressor.needs
    tokens = kv[0][0].shape[1]
    generator = torch.Generator().manual_seed(5)
    shape = (spec.query_heads, tokens, spec.head_dim)
    seen = []
    for layer in range(spec.layers):
        queries = torch.randn(shape, generator=generator)
        if needs.q_stream:
            step = Step(rid=rid, layer=layer, start=0, queries=queries)
            assert compressor.update(step) is None
        tail = None
        if needs.q_tail:
            tail = QueryTail(queries[:, -needs.q_tail :], tokens)
        seen.append(Seen(tail=tail))
    return seen


def replay_of(kv):
    """Return what runs a probe behind the prompt, with queries that are drawn."""
    spec = spec_of(kv)

    def replay(probe):
        new = len(probe.tokens)
        generator = torch.Generator().manual_seed(probe.start)
        for layer, (keys, values) in enumerate(kv):
            rows = (spec.query_heads, new, spec.head_dim)
            own = (spec.kv_heads, new, spec.head_dim)
            yield ProbeLayer(
                layer=layer,
                queries=torch.randn(rows, generator=generator),
                probe_keys=torch.randn(own, generator=generator).to(keys.dtype),
                keys=keys,
                values=values,
            )

    return replay


def compressed_by(compressor, kv, keep):
    """Take one request through its life."""
    compressor.open("r")
    seen = collected(compressor, kv, "r")
    result = compressor.compress(
        kv,
        keep if compressor.selector else None,
        rid="r",
        token_ids=list(range(kv[0][0].shape[1])),
        seen=seen,
        replay=replay_of(kv),
    )
    compressor.close("r")
    return result


def kept_rows(result, layer, tokens):
    """Return the kept positions of each head, by walking the prompt."""
    rows = result.dropped_indices[layer].tolist()
    return [[t for t in range(tokens) if t not in dropped] for dropped in rows]


@pytest.mark.parametrize("line", sorted(set(PAIRS)))
@settings(**LENIENT, max_examples=12)
@given(
    shape=st.tuples(
        st.integers(1, 2),  # layers
        st.integers(1, 3),  # heads
        st.integers(1, 70),  # tokens
        st.sampled_from([8, 16]),
    ),
    dtype=st.sampled_from(DTYPES),
    keep=st.floats(0.02, 1.0),
    raw=st.booleans(),
)
def test_every_pair_drops_packs_and_restores_every_bit(
    line, make_services, shape, dtype, keep, raw
):
    _, heads, tokens, dim = shape
    kv = drawn(shape, dtype)
    if raw:  # any bit pattern: infinities, NaN with payloads, subnormal numbers
        kv = [(bits_noise(k, 1), bits_noise(v, 2)) for k, v in kv]
    before = [(k.clone(), v.clone()) for k, v in kv]
    compressor = create_compressor(line, 3).bind(make_services(spec_of(kv)))
    result = compressed_by(compressor, kv, keep)
    for layer, (keys, values) in enumerate(kv):
        rows = kept_rows(result, layer, tokens)
        (count,) = {len(row) for row in rows}
        assert 1 <= count <= tokens
        assert count == tokens or count % compressor.token_align == 0
        restored = compressor.restore(result, layer)
        draft = compressor.decompress(result, layer)
        for entries, given_, whole, near in zip(
            (keys, values), before[layer], restored, draft, strict=True
        ):
            assert torch.equal(bits_of(entries), bits_of(given_)), "input was changed"
            assert torch.equal(bits_of(whole), bits_of(entries))
            assert whole.dtype == near.dtype == dtype
            assert near.shape == (heads, count, dim)
            if compressor.codec is None:
                for head, row in enumerate(rows):
                    wanted = bits_of(entries)[head, row]
                    assert torch.equal(bits_of(near)[head], wanted)
    check_sizes(compressor, result, kv)


def bits_noise(entries, seed):
    integer = INTEGERS[entries.element_size()]
    reach = 2 ** (8 * entries.element_size() - 1)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(-reach, reach, entries.shape, generator=generator)
    return noise.to(integer).view(entries.dtype)


def check_sizes(compressor, result, kv):
    """Compare what a result says of itself with its tensors."""
    heads, tokens, _ = kv[0][0].shape
    whole = sum(k.nbytes + v.nbytes for k, v in kv)
    gone = sum(index.numel() for index in result.dropped_indices)
    share = 1 - gone / (heads * tokens * len(kv))
    assert result.keep == pytest.approx(share)
    assert result.raw_bytes == whole
    assert result.transfer_fraction == result.transfer_bytes / whole
    kept_bits = 8 * kv[0][0].element_size()
    if compressor.codec is None:
        assert result.bits == kept_bits
        assert result.transfer_fraction == pytest.approx(1 - share)
    else:
        parts = result.payload
        stay = sum(t.nbytes for part in parts for t in part.tensors.values())
        assert result.draft_bytes == stay
        assert result.bits == pytest.approx(8 * stay * kept_bits / 8 / whole / share)
        if not compressor.codec.splits:
            assert result.transfer_fraction == pytest.approx(1.0)
    draft_fraction = result.draft_bytes / whole
    assert draft_fraction == pytest.approx(result.bits / kept_bits * share)


@pytest.mark.parametrize("line", ["kvzip", "snapkv+turboquant"])
def test_raising_keep_gives_nested_sets_and_keeps_the_protected(line, make_services):
    kv = drawn((2, 2, 64, 8))
    compressor = create_compressor(line, 3).bind(make_services(spec_of(kv)))
    compressor = replace(compressor, sink_tokens=2, recent_tokens=3)
    kept = []
    for keep in (0.1, 0.3, 0.55, 0.8, 1.0):
        result = compressed_by(compressor, kv, keep)
        kept.append([kept_rows(result, layer, 64) for layer in range(2)])
        for row in (row for rows in kept[-1] for row in rows):
            assert {0, 1, 61, 62, 63} <= set(row)
    for fewer, more in pairwise(kept):
        for layer in range(2):
            for a, b in zip(fewer[layer], more[layer], strict=True):
                assert set(a) <= set(b)
    assert kept[-1] == [[list(range(64))] * 2] * 2


def test_scores_come_first_and_codes_are_of_sorted_kept_tokens(make_services, tmp_path):
    kv = drawn((2, 2, 40, 8))
    orders = [torch.randperm(16), torch.randperm(16)]
    tables = write_tables(tmp_path / "order", orders, 2)
    line = f"random+rotatekv:bits=8,clip=1.0,group=8,tables={tables.source}"
    compressor = create_compressor(line, 0).bind(make_services(spec_of(kv)))
    compressor = replace(compressor, sink_tokens=0, recent_tokens=0)
    result = compressed_by(compressor, kv, 0.4)
    rows = kept_rows(result, 1, 40)
    assert rows[0] != rows[1], "heads must differ for this to show anything"
    assert result.payload[1].positions.tolist() == rows
    draft = compressor.decompress(result, 1)
    for i, entries in enumerate(kv[1]):
        for head, row in enumerate(rows):
            assert (draft[i][head] - entries[head, row]).abs().max() < 0.05
    seer = marked(codec=compressor.codec)
    seer.compress(kv, 0.5, seen=[Seen(), Seen(noted=torch.ones(2, 40))])
    for layer, (keys, values, seen) in enumerate(seer.selector.shown):
        assert keys is kv[layer][0], "scores are of the exact KV"
        assert values is kv[layer][1]
        assert (seen.noted is None) == (layer == 0)


def test_counts_are_multiples_for_both_parts():
    kv = drawn((1, 2, 96, 8))
    codec = create_compressor("kivi:group=8,window=8", 0).codec
    compressor = marked(codec, align=12)
    assert compressor.token_align == 24
    assert compressor.compress(kv, 0.3).keep == 48 / 96
    assert create_compressor("snapkv", 0).token_align == 1
    assert create_compressor("snapkv+split-planes", 0).token_align == 64


def test_a_threshold_counts_where_no_share_is_given():
    kv = drawn((1, 1, 50, 8))
    assert marked(share=0.9).compress(kv).keep == pytest.approx(45 / 50)
    assert marked(share=0.9).compress(kv, 0.8).keep == pytest.approx(40 / 50)
    assert create_compressor("kivi:group=2,window=2", 0).compress(kv).keep == 1


def test_a_request_lives_as_long_as_the_call_unless_it_is_named():
    kv = drawn((1, 1, 8, 8))
    compressor = marked()
    compressor.compress(kv, 0.5)
    compressor.open("a")
    compressor.compress(kv, 0.5, rid="a")
    assert compressor.selector.requests == [("open", ""), ("close", ""), ("open", "a")]
    broken = marked(shape=(3, 3))
    with pytest.raises(CompressionError):
        broken.compress(kv, 0.5)
    assert broken.selector.requests[-1] == ("close", "")


def test_a_pair_is_known_by_both_of_its_parts():
    pair = create_compressor("snapkv+split-planes", 0)
    assert pair.about.kind == "split"
    assert pair.about.scenarios == ("long-context",)
    assert "2404.14469" in pair.about.paper
    assert create_compressor("kvzip+kivi", 0).about.mode == "offline"
    assert create_compressor("kivi", 0).about.mode == "online"
    assert pair.needs.q_tail == 64
    alone = create_compressor("kivi", 0)
    assert alone.needs == Needs(keys=False)
    assert alone.update(Step(rid="r", layer=0, start=0)) is None
    assert marked().identity == f"{__name__}.Marked(seed=0)"


KV = drawn((2, 2, 32, 8))
REFUSED = [
    ("keynorm", KV, {"keep": None}, "keynorm: keep must be a share .*, got None"),
    ("keynorm", KV, {"keep": 0.0}, r"keep must be a share in \(0, 1\], got 0.0"),
    ("keynorm", KV, {"keep": 1.5}, r"got 1.5"),
    ("keynorm", KV, {"keep": float("nan")}, r"got nan"),
    ("kivi", KV, {"keep": 0.5}, "a codec alone drops nothing, keep must be 1, got 0.5"),
    ("keynorm", KV, {"keep": 1, "seen": [Seen()]}, "seen: 1 layers, KV of 2"),
    ("keynorm", [], {"keep": 1}, r"full_kv must be layers .*, got \[\]"),
    (
        "keynorm",
        [*KV, *drawn((1, 2, 31, 8))],
        {"keep": 1},
        r"equally many tokens, got \[31, 32\]",
    ),
    ("keynorm", [(KV[0][0], KV[0][1][:1])], {"keep": 1}, "do not go with keys"),
    ("keynorm", [(KV[0][0].int(), KV[0][1])], {"keep": 1}, "keys must be bfloat16"),
    ("snapkv", KV, {"keep": 0.5}, "the prompt's last queries are missing"),
    ("kvzip", KV, {"keep": 0.5}, "it runs probes, so compress needs token_ids"),
    (
        "kvzip",
        KV,
        {"keep": 0.5, "replay": replay_of(KV), "token_ids": [1] * 31},
        "token_ids must be those of 32 tokens, got 31",
    ),
]


@pytest.mark.parametrize(("line", "kv", "arguments", "says"), REFUSED)
def test_what_cannot_be_compressed_is_refused(line, kv, arguments, says):
    with pytest.raises(CompressionError, match=says):
        create_compressor(line, 0).compress(kv, **arguments)


def test_scores_of_another_shape_are_refused():
    with pytest.raises(CompressionError, match=r"scores of layer 0 must be \[2, 32\]"):
        marked(shape=(1, 32)).compress(KV, 0.5)


def test_parts_that_are_none_are_refused():
    with pytest.raises(CompressionError, match="neither a selector nor a codec"):
        Compressor(line="x")
    with pytest.raises(CompressionError, match="'x': codec must be a Codec, got a Mar"):
        Compressor(line="x", codec=Marked())
    with pytest.raises(CompressionError, match="'x': selector must be a Selector, got"):
        Compressor(line="x", selector=Entries)

    class Remote(Marked):
        about = About(scenarios=("remote-prefix",))

    codec = create_compressor("kivi", 0).codec
    assert Compressor(line="x", selector=Remote(), codec=codec).about.kind == "quantize"

    class Nowhere(Marked):
        about = About(scenarios=())

    with pytest.raises(CompressionError, match="no scenario fits both of its parts"):
        Compressor(line="x", selector=Nowhere(), codec=codec)
