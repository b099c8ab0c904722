"""Packed draft parts of requests: counted in blocks, found where they are, decoded."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang")

from vericache_sglang.compression.budget import Budget, budget_for
from vericache_sglang.compression.codecs.catalog import create_codec
from vericache_sglang.errors import CompressionError
from vericache_sglang.kv import packed_drafts
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.handles import KVHandles
from vericache_sglang.kv.packed_drafts import Codes, SlotDrafts
from vericache_sglang.kv.request import Parts
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.kv.split_layers import pick
from vericache_sglang.scheduling.plan import Residency

pytestmark = pytest.mark.sglang

LAYERS, HEADS, DIM, SLOTS = 2, 2, 32, 1500
LINES = [
    "split-planes:exponent_bits=4,mantissa_bits=3,block=64",
    "kivi:bits=2,group=32,window=32",
    "turboquant:bits=3",
]
OWN = 3
"""The request's row of the table."""


def codes_of(line=LINES[0], page=1, dtype=torch.bfloat16):
    geometry = KVGeometry(
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        element_bytes=dtype.itemsize,
        page_size=page,
    )
    buffers = torch.zeros(2, LAYERS, SLOTS, HEADS, DIM, dtype=dtype)
    pool = SimpleNamespace(k_buffer=list(buffers[0]), v_buffer=list(buffers[1]))
    table = torch.zeros(5, SLOTS, dtype=torch.int32)
    host = SimpleNamespace(dtype=dtype)
    handles = KVHandles(geometry, pool, table, host, None)
    return Codes(create_codec(line).without_tail(), handles), handles


@given(
    st.integers(1, 300),
    st.floats(0.05, 1.0),
    st.integers(0, 8),
    st.integers(0, 40),
    st.sampled_from([1, 4, 16, 64, 128]),
    st.sampled_from(LINES),
)
def test_whole_blocks_are_packed_into_whole_pages(
    pages, keep, sinks, recent, page, line
):
    codes, handles = codes_of(line, page)
    plain = budget_for(pages * page, keep, sinks, recent, page)
    budget = codes.complete(plain)
    assert codes.block % page == codes.block % codes.codec.needs.token_align == 0
    assert budget.coded % codes.block == 0
    assert budget.exact + budget.coded == plain.kept
    assert 0 <= plain.kept - sinks - recent - budget.coded < codes.block or (
        budget.coded == 0
    )
    assert budget.code_slots % page == 0
    assert budget.slots % page == 0
    assert (budget.code_slots == 0) is (budget.coded == 0)
    # A codec's bits, not more slots than that takes: a page is lost at most.
    raw = handles.geometry.token_bytes // LAYERS
    if budget.coded:
        bits = codes.codec.draft_bits(_part_shape(codes, handles, budget.coded))
        bytes_used = budget.code_slots * raw
        wanted = bits / 16 * budget.coded * raw
        segments = -(-budget.coded // SEGMENT)
        assert bytes_used < wanted + (segments * 1.5 + page) * raw + segments * 200


def _part_shape(codes, handles, tokens):
    from vericache_sglang.compression.codecs.base import PartShape

    geometry = handles.geometry
    return PartShape(
        heads=geometry.kv_heads,
        tokens=tokens,
        key_dim=DIM,
        value_dim=DIM,
        dtype=handles.host.dtype,
    )


def test_blocks_that_do_not_fill_a_segment_are_refused():
    for line, page in (("split-planes:block=48", 1), (LINES[2], 48)):
        with pytest.raises(
            CompressionError, match="packs 48 tokens together, which does not divide"
        ):
            codes_of(line, page)


@pytest.mark.parametrize(("line", "share"), [(LINES[0], 4 / 16), (LINES[2], 1.0)])
def test_a_verification_brings_back_what_the_codec_left_out(line, share):
    """Four mantissa bits of bfloat16, before escapes; all of an approximation."""
    codes, _ = codes_of(line)
    assert codes.transfer_fraction == share


def split_request(handles, codes, layout, seed=0, coded=SEGMENT + 64):
    """Pack tokens, each head others, into slots that are nowhere in order."""
    generator = torch.Generator().manual_seed(seed)
    offered = coded + 30
    budget = codes.complete(Budget(offered, coded + 8, 4, 4))
    assert budget.coded == coded
    slots = torch.randperm(SLOTS, generator=generator)
    draft, body = slots[: budget.slots], slots[budget.slots :][:offered]
    kv = torch.randn(2, LAYERS, offered, HEADS, DIM, generator=generator)
    kv = kv.to(handles.host.dtype)
    order = torch.rand(LAYERS, HEADS, offered, generator=generator).argsort()
    chosen = order[..., : budget.kept].sort().values
    packed = chosen[..., 4 : 4 + coded]
    row = draft if layout is Residency.HOST else torch.cat([body, draft])
    handles.table[OWN, : len(row)] = row.to(torch.int32)
    for layer in range(LAYERS):
        pair = (pick(side[layer], packed[layer]) for side in kv)
        parts = codes.encode(layer, *pair, packed[layer])
        codes.put(layer, draft[: budget.code_slots], parts)
    parts = Parts(budget, chosen[..., :8], packed.to(torch.int32), layout, True)
    req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=OWN))
    return SimpleNamespace(req=req, split=parts), kv, packed


def each_segment(kv, packed, layer):
    """Yield the positions [H, t] and the KV [2][H, t, D] of every segment."""
    for start in range(0, packed.shape[2], SEGMENT):
        where = packed[layer, :, start : start + SEGMENT]
        yield (
            where,
            [
                torch.stack([kv[i, layer, where[h], h] for h in range(HEADS)])
                for i in range(2)
            ],
        )


@pytest.mark.parametrize("layout", [Residency.HOST, Residency.DEVICE])
@pytest.mark.parametrize("line", LINES)
def test_segments_decode_to_what_the_codec_makes_of_these_tokens(line, layout):
    codes, handles = codes_of(line)
    state, kv, packed = split_request(handles, codes, layout)
    read = codes.segments(state)
    for layer in range(LAYERS):
        segments = read(layer)
        assert len(segments) == 2
        wanted = each_segment(kv, packed, layer)
        for segment, (where, pair) in zip(segments, wanted, strict=True):
            draft, _ = codes.codec.encode(*pair, layer=layer, positions=where)
            for found, near in zip(segment(), codes.codec.decode(draft), strict=True):
                assert torch.equal(found.view(torch.int16), near.view(torch.int16))


@pytest.mark.parametrize("layout", [Residency.HOST, Residency.DEVICE])
def test_drafts_join_with_their_residuals(layout):
    codes, handles = codes_of()
    state, kv, packed = split_request(handles, codes, layout)
    read = codes.drafts(state)
    for layer in range(LAYERS):
        wanted = each_segment(kv, packed, layer)
        for part, (where, pair) in zip(read(layer), wanted, strict=True):
            assert part.layer == layer
            assert torch.equal(part.positions, where.to(torch.int32))
            _, residual = codes.codec.encode(*pair, layer=layer, positions=where)
            joined = codes.codec.join(
                replace(part, part_shape=residual.part_shape), residual
            )
            for found, whole in zip(joined, pair, strict=True):
                assert torch.equal(found.view(torch.int16), whole.view(torch.int16))


@pytest.mark.parametrize("run", [0, 64])
def test_a_kernel_finds_the_fields_of_every_segment(run):
    """Shared segments of one run each begin a page."""
    codes, _ = codes_of(page=16)
    budget = replace(codes.segment(SEGMENT, 64), run=run).times(3)
    assert len(codes.layout(budget).segments) == (3 if run else 1)
    random = torch.Generator().manual_seed(0)
    shape = (2, 192, HEADS, DIM)
    keys, values = torch.randn(shape, generator=random).to(torch.bfloat16)
    coded = torch.arange(192).expand(LAYERS, HEADS, 192)
    slots = torch.randperm(SLOTS, generator=random)[: budget.code_slots]
    codes.put(1, slots, codes.encode(1, keys, values, coded[1], run), run)
    drafts = SlotDrafts(codes.layout(budget), codes.buffers, coded, slots)
    planes = drafts.planes(1)
    assert planes.tokens.tolist() == [part.part_shape.tokens for part in drafts(1)]
    for part, places in zip(drafts(1), planes.offsets.tolist(), strict=True):
        for name, place in zip(part.tensors, places, strict=True):
            content = part.tensors[name].contiguous().view(torch.uint8).flatten()
            side = planes.value_bytes if "value" in name else planes.key_bytes
            assert torch.equal(side[place : place + len(content)], content)


def test_a_reader_reads_the_slots_of_when_it_was_made():
    """A reload reads on while a plan moves the request, whose row is then relisted."""
    codes, handles = codes_of()
    state, _, _ = split_request(handles, codes, Residency.HOST)
    drafts, segments = codes.drafts(state), codes.segments(state)
    before = segments(1)[0]()
    bits = [part.tensors for part in drafts(1)]
    handles.table[OWN] = 0
    assert torch.equal(segments(1)[0]()[0], before[0])
    for tensors, old in zip((part.tensors for part in drafts(1)), bits, strict=True):
        assert all(torch.equal(tensors[name], old[name]) for name in old)


@pytest.mark.parametrize("at_once", [100, 2048])
def test_on_a_cpu_codes_are_decoded_once(monkeypatch, at_once):
    monkeypatch.setattr(packed_drafts, "MOST_SLOTS_A_PART", at_once)
    codes, handles = codes_of()
    state, _, packed = split_request(handles, codes, Residency.HOST)
    count = -(-packed.shape[2] // at_once)

    def read(method):
        return [[segment() for segment in method(state)(i)] for i in range(LAYERS)]

    def joined(layers, side):
        return [torch.cat([pair[side] for pair in one], dim=1) for one in layers]

    wanted, found = read(codes.segments), read(codes.decoded)
    for side in range(2):
        pairs = zip(joined(found, side), joined(wanted, side), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert [len(pieces) for pieces in found] == [count] * LAYERS
    monkeypatch.setattr(type(codes.codec), "decode", None)
    assert read(codes.decoded)[1][0][0] is found[1][0][0]


def test_nothing_packed_is_nothing_to_read():
    codes, handles = codes_of()
    budget = codes.complete(Budget(60, 30, 4, 4))
    assert (budget.coded, budget.code_slots) == (0, 0)
    none = torch.zeros(LAYERS, HEADS, 0, dtype=torch.int32)
    parts = Parts(budget, none, none, Residency.HOST, True)
    req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=OWN))
    state = SimpleNamespace(req=req, split=parts)
    assert codes.drafts(state)(0) == codes.segments(state)(1) == []
    kv = torch.zeros(60, HEADS, DIM, dtype=torch.bfloat16)
    nothing = codes.encode(0, kv[:0], kv[:0], none[0].long())
    assert nothing == []
    codes.put(0, torch.zeros(0, dtype=torch.int64), nothing)
    assert not any(buffer.any() for buffer in handles.pool.k_buffer)


@pytest.mark.parametrize("line", LINES)
def test_decoding_is_timed(line):
    codes, _ = codes_of(line)
    assert 0 < codes.seconds_per_token() < 0.01
