"""Packed draft parts in slots: what is written is read, and nothing else is touched."""

import math

import pytest
import torch
from bound_codecs import DIM, HEADS, LINES, bound_codecs
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.compression.codecs.base import CodecNeeds, PartShape, PartSpec
from vericache_sglang.kv.code_slots import ALIGN, CodeLayout
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.segment_length import SEGMENT, segment_bounds

POOL = 700
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    return bound_codecs(tmp_path_factory.mktemp("tables"))


def layout_of(codec, dtype, coded, page=1, v_head_dim=DIM):
    geometry = KVGeometry(
        layers=3,
        kv_heads=HEADS,
        head_dim=DIM,
        v_head_dim=v_head_dim,
        element_bytes=dtype.itemsize,
        page_size=page,
    )
    return CodeLayout(codec, geometry, dtype, coded)


def encoded(codec, segment, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randn(2, HEADS, segment.tokens, DIM, generator=generator).to(dtype)
    positions = torch.arange(segment.start, segment.start + segment.tokens)
    none = torch.empty(0, dtype=torch.int64)
    part, _ = codec.encode(*pair, positions=positions, sinks=none)
    return part, positions


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


def whole_blocks(codec, tokens):
    block = codec.needs.token_align
    return max(block, tokens // block * block)


@pytest.mark.parametrize("order", ["scattered", "run", "run but for two"])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("line", LINES)
def test_what_is_written_is_read_and_no_other_slot_changes(
    line, dtype, page, order, codecs
):
    codec = codecs[line]
    layout = layout_of(codec, dtype, whole_blocks(codec, SEGMENT + 100), page)
    generator = torch.Generator().manual_seed(1)
    pages = torch.randperm(POOL // page, generator=generator)[: layout.slots // page]
    slots = (pages[:, None] * page + torch.arange(page)).flatten()
    if order != "scattered":
        slots = torch.arange(7 * page, 7 * page + layout.slots)
    if order == "run but for two":
        slots[[2, 3]] = slots[[3, 2]]
    buffers = torch.randn(2, POOL, HEADS, DIM, generator=generator).to(dtype)
    before = buffers.view(torch.uint8).clone()
    parts = [
        encoded(codec, segment, dtype, i) for i, segment in enumerate(layout.segments)
    ]
    for segment, (part, _) in zip(layout.segments, parts, strict=True):
        layout.write(segment, tuple(buffers), slots, part)
    for segment, (part, positions) in zip(layout.segments, parts, strict=True):
        found = layout.read(segment, tuple(buffers), slots, 2, positions)
        assert found.codec == part.codec
        assert (found.layer, found.positions) == (2, positions)
        assert found.tensors.keys() == part.tensors.keys()
        for name, tensor in part.tensors.items():
            assert found.tensors[name].dtype == tensor.dtype
            assert found.tensors[name].shape == tensor.shape
            assert raw(found.tensors[name]) == raw(tensor)
    others = torch.ones(POOL, dtype=torch.bool)
    others[slots] = False
    changed = buffers.view(torch.uint8)[:, others]
    assert torch.equal(changed, before[:, others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("line", LINES)
def test_what_is_read_decodes_as_what_was_encoded(line, dtype, codecs):
    codec = codecs[line]
    layout = layout_of(codec, dtype, whole_blocks(codec, 100))
    slots = torch.arange(layout.slots).flip(0)
    buffers = tuple(torch.zeros(2, POOL, HEADS, DIM, dtype=dtype))
    (segment,) = layout.segments
    part, positions = encoded(codec, segment, dtype, 5)
    wanted = codec.decode(part)
    layout.write(segment, buffers, slots, part)
    found = codec.decode(layout.read(segment, buffers, slots, 0, positions))
    for one, other in zip(found, wanted, strict=True):
        assert raw(one) == raw(other)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("line", LINES)
def test_as_many_slots_as_the_bits_need(line, dtype, page, codecs):
    codec = codecs[line]
    tokens = whole_blocks(codec, 2 * SEGMENT + 200)
    layout = layout_of(codec, dtype, tokens, page)
    width, used, counted = HEADS * DIM * dtype.itemsize, 0, 0
    for segment in layout.segments:
        images = {True: 0, False: 0}
        for name, (kind, shape) in codec.draft_layout(segment.part_shape).items():
            size = kind.itemsize * math.prod(shape)
            images[name.startswith("value")] += math.ceil(size / ALIGN) * ALIGN
        image = max(images.values())
        assert segment.slots * width >= image > (segment.slots - 1) * width
        # Keys and values are about as large, so little of a slot is left over; but
        # without neighbours to share an exponent with, every key has its own.
        least = 0.2 if line.endswith("block=1") else 0.8
        assert min(images.values()) > least * image
        assert (segment.start, segment.first) == (counted, used)
        counted, used = counted + segment.tokens, used + segment.slots
    assert counted == tokens
    assert layout.slots % page == 0
    assert used <= layout.slots < used + page


@given(st.integers(0, 5 * SEGMENT))
def test_segments_are_every_token_once_and_full_but_for_the_last(tokens):
    bounds = segment_bounds(tokens)
    assert [t for start, stop in bounds for t in range(start, stop)] == [*range(tokens)]
    assert all(stop - start == SEGMENT for start, stop in bounds[:-1])
    assert all(stop > start for start, stop in bounds)


def test_nothing_packed_takes_nothing(codecs):
    layout = layout_of(codecs[LINES[0]], torch.bfloat16, 0)
    assert (layout.segments, layout.slots) == ((), 0)


class Ramp:
    """A codec of one field of so many bytes; enough for a layout."""

    identity, needs = "ramp", CodecNeeds()

    def __init__(self, *sizes):
        self.sizes = sizes

    def draft_layout(self, part_shape):
        return {
            f"{self.name(i)}": (torch.uint8, (n,)) for i, n in enumerate(self.sizes)
        }

    def name(self, i):
        """Return a field's name: every other one is of the values."""
        return f"{'value' if i % 2 else 'key'}{i}"


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=4),
    st.sampled_from([(32, 32), (8, 24), (1, 3)]),
    st.randoms(use_true_random=False),
)
def test_fields_of_any_size_survive_keys_and_values_of_any_width(sizes, dims, random):
    """Every byte of a slot is used, also where keys and values differ in width."""
    codec = Ramp(*sizes)
    geometry = KVGeometry(
        layers=2,
        kv_heads=HEADS,
        head_dim=dims[0],
        v_head_dim=dims[1],
        element_bytes=2,
        page_size=1,
    )
    layout = CodeLayout(codec, geometry, torch.bfloat16, 3)
    fields = {
        codec.name(i): torch.tensor([random.randrange(256) for _ in range(n)]).to(
            torch.uint8
        )
        for i, n in enumerate(sizes)
    }
    part_shape = PartShape(
        heads=HEADS,
        tokens=3,
        key_dim=dims[0],
        value_dim=dims[1],
        dtype=torch.bfloat16,
    )
    total = layout.slots + 20
    buffers = tuple(
        torch.zeros(total, HEADS, dim, dtype=torch.bfloat16) for dim in dims
    )
    slots = torch.tensor(random.sample(range(total), layout.slots), dtype=torch.int64)
    if not layout.slots:
        assert not any(sizes)
        return
    layout.write(
        layout.segments[0],
        buffers,
        slots,
        PartSpec("ramp", part_shape, 0, None, fields),
    )
    found = layout.read(layout.segments[0], buffers, slots, 0, None)
    assert {name: raw(t) for name, t in found.tensors.items()} == {
        name: raw(t) for name, t in fields.items()
    }
