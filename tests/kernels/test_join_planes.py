"""Joining planes: by plain loops over bits, by the codec, and the kernel by both.

The kernel runs in a process of its own, see ``kernel_device``: this file as a script.
"""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import moved, report, run, unsynced

from vericache_kernels.join_planes import (
    DraftPlanes,
    PlaneTarget,
    Residuals,
    SplitPlanesStep,
    bytes_moved,
    join_planes,
)
from vericache_kernels.join_planes.planes import FORMATS
from vericache_kernels.join_planes.ref import join_rows
from vericache_sglang.compression.codecs.split_planes import SplitPlanes

SLOTS = 160
ALIGN = 16
STEPS = {
    torch.bfloat16: [(3, 0), (3, 1), (4, 3), (2, 2), (1, 0), (7, 0), (1, 6), (5, 1)],
    torch.float16: [(3, 1), (3, 2), (4, 3), (4, 0), (1, 5), (2, 0)],
    torch.float32: [(3, 1), (4, 3), (3, 4), (2, 0)],
}
RESIDUAL = ("key_rest", "value_rest", "escapes")


@dataclass(frozen=True, eq=False)
class Case:
    """A layer's segments as the codec packed them, and where they go.

    Attributes:
        codec: Of the planes.
        parts: (keys, values, draft part, residual) of each segment.
        call: Arguments of ``join_planes``.
    """

    codec: SplitPlanes
    parts: list
    call: tuple

    def again(self):
        """Return the call with buffers of its own."""
        *planes, target = self.call
        return *planes, dataclasses.replace(
            target, k_buffer=target.k_buffer.clone(), v_buffer=target.v_buffer.clone()
        )


def arena(parts, fields):
    """Lay fields end to end; gaps and ends are 0xFF, so reading on is seen."""
    pieces, offsets, size = [torch.full((ALIGN,), 0xFF, dtype=torch.uint8)], [], ALIGN
    for part in parts:
        row = []
        for name in fields:
            content = part.tensors[name].contiguous().flatten()
            gap = -len(content) % ALIGN + ALIGN
            row.append(size)
            pieces += [content, torch.full((gap,), 0xFF, dtype=torch.uint8)]
            size += len(content) + gap
        offsets.append(row)
    return torch.cat(pieces), torch.tensor(offsets).view(len(parts), len(fields))


def numbers(shape, dtype, random, wild):
    """Return normal numbers; a share of them, ``wild``, of any bits at all."""
    sizes = torch.randn(shape[-1], generator=random).mul(2).exp()
    made = (torch.randn(shape, generator=random) * sizes).to(dtype)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    bits = torch.randint(0, 256, size, generator=random, dtype=torch.uint8)
    integer = FORMATS[dtype].integer
    chosen = torch.rand(shape, generator=random) < wild
    return bits.view(integer).where(chosen, made.view(integer)).view(dtype)


def built(codec, dtype, shape, segments, wild=0.2):
    heads, *dims = shape
    random = torch.Generator().manual_seed(sum(segments) + heads)
    parts = []
    for tokens in segments:
        entries = [numbers((heads, tokens, d), dtype, random, wild) for d in dims]
        parts.append((*entries, *codec.encode(*entries)))
    step = SplitPlanesStep(codec.exponent_bits, codec.mantissa_bits, codec.block)
    drafts = [part[2] for part in parts]
    key_bytes, key_offsets = arena(drafts, step.fields[:2])
    value_bytes, value_offsets = arena(drafts, step.fields[2:])
    plane_bytes, plane_offsets = arena([part[3] for part in parts], RESIDUAL)
    counts = torch.tensor(segments, dtype=torch.int32)
    escapes = torch.tensor([part[3].part_shape.escapes for part in parts])
    total = sum(segments)
    places = [torch.randperm(total + 3, generator=random)[:total] for _ in range(heads)]
    draft = DraftPlanes(
        key_bytes, value_bytes, torch.cat([key_offsets, value_offsets], 1), counts
    )
    residual = Residuals(plane_bytes, plane_offsets, escapes.to(torch.int32))
    target = PlaneTarget(
        *(numbers((SLOTS, heads, dim), dtype, random, 0.0) for dim in dims),
        slots=torch.randperm(SLOTS, generator=random)[: total + 3],
        places=torch.stack(places).to(torch.int32),
        first=counts.cumsum(0) - counts,
        most_tokens=max(segments) + 1,
    )
    return Case(codec, parts, (draft, residual, step, target))


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from(list(STEPS)))
    step = draw(st.sampled_from(STEPS[dtype]))
    codec = SplitPlanes(*step, draw(st.sampled_from([16, 64, 96])))
    segments = draw(st.lists(st.integers(1, 50), min_size=1, max_size=3))
    dims = draw(st.sampled_from([(8, 8), (16, 32), (32, 16), (8, 64)]))
    wild = draw(st.sampled_from([0.0, 0.1, 1.0]))
    heads = draw(st.integers(1, 3))
    return built(codec, dtype, (heads, *dims), segments, wild)


def bits_of(entries):
    return entries.view(FORMATS[entries.dtype].integer)


def codes_of(row, width, count):
    """Read codes from a row of bytes as from one long number."""
    word = int.from_bytes(bytes(row.tolist()), "little")
    return [word >> width * i & (1 << width) - 1 for i in range(count)]


def hand_oracle(case, segment, heads, dims):
    """Number by number; returns bits [side][head][token][dim] without a sign."""
    draft, residual = (part.tensors for part in case.parts[segment][2:])
    part_shape = case.parts[segment][2].part_shape
    form = FORMATS[part_shape.dtype]
    e, m = case.codec.exponent_bits, case.codec.mantissa_bits
    rest = form.mantissa - m
    escapes = case.parts[segment][3].part_shape.escapes
    listed = iter(codes_of(residual["escapes"], form.exponent, escapes))
    found = []
    for side, dim in zip(("key", "value"), dims, strict=True):
        entries = []
        for head in range(heads):
            entries.append([])
            for token in range(part_shape.tokens):
                codes = codes_of(draft[f"{side}_codes"][head, token], 1 + e + m, dim)
                if side == "key":
                    row = draft["key_shared"][head, token // case.codec.block]
                    shared = codes_of(row, form.exponent, dim)
                else:
                    row = draft["value_shared"][head]
                    shared = [
                        codes_of(row, form.exponent, part_shape.tokens)[token]
                    ] * dim
                packed = residual[f"{side}_rest"][head, token].tolist()
                whole = rest // 8
                tops = codes_of(torch.tensor(packed[whole * dim :]), rest % 8, dim)
                entry = []
                for i, code in enumerate(codes):
                    low = tops[i] << 8 * whole if rest % 8 else 0
                    for plane in range(whole):
                        low += packed[plane * dim + i] << 8 * plane
                    distance = code >> m & (1 << e) - 1
                    escaped = distance == (1 << e) - 1
                    exponent = next(listed) if escaped else shared[i] - distance
                    number = (code >> e + m) << form.exponent
                    number = (number + exponent) << form.mantissa
                    entry.append(number + ((code & (1 << m) - 1) << rest) + low)
                entries[head].append(entry)
        found.append(entries)
    return found


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        (SplitPlanes(3, 1, 16), torch.bfloat16),
        (SplitPlanes(2, 1, 16), torch.float16),
        (SplitPlanes(4, 3, 16), torch.float32),
    ],
    ids=["bf16", "fp16", "fp32"],
)
def test_every_number_is_put_together_as_by_hand(codec, dtype):
    heads, dims, segments = 2, (8, 16), (19, 3)
    case = built(codec, dtype, (heads, *dims), segments)
    target = case.call[3]
    found = join_planes(*case.call)
    assert found.tolist() == case.call[1].escapes.tolist()
    assert found.min() > 0
    form = FORMATS[dtype]
    unsigned = (1 << form.exponent + form.mantissa + 1) - 1
    for segment, tokens in enumerate(segments):
        sides = hand_oracle(case, segment, heads, dims)
        for buffer, side in zip((target.k_buffer, target.v_buffer), sides, strict=True):
            for head in range(heads):
                for token in range(tokens):
                    place = target.places[head, int(target.first[segment]) + token]
                    entry = bits_of(buffer)[target.slots[place], head]
                    assert [n & unsigned for n in entry.tolist()] == side[head][token]


@given(case=cases())
def test_joined_planes_are_the_kv_that_was_encoded(case):
    before = case.again()[3]
    target = case.call[3]
    assert torch.equal(join_planes(*case.call), case.call[1].escapes)
    heads = torch.arange(target.places.shape[0])[:, None]
    for segment, (keys, values, draft, residual) in enumerate(case.parts):
        first = int(target.first[segment])
        own = target.places[:, first : first + draft.part_shape.tokens].long()
        joined = case.codec.join(draft, residual)
        for i, (buffer, entries) in enumerate(
            ((target.k_buffer, keys), (target.v_buffer, values))
        ):
            written = bits_of(buffer)[target.slots[own], heads]
            assert torch.equal(written, bits_of(entries))
            assert torch.equal(written, bits_of(joined[i]))
    written = torch.zeros(target.k_buffer.shape[:2], dtype=torch.bool)
    written[target.slots[target.places.long()], heads] = True
    for name in ("k_buffer", "v_buffer"):
        left = (bits_of(getattr(t, name))[~written] for t in (target, before))
        assert torch.equal(*left)


def test_escapes_that_are_not_listed_are_counted_and_not_read():
    case = built(SplitPlanes(3, 1, 16), torch.bfloat16, (1, 8, 8), (20,), wild=0.5)
    draft, residual, step, target = case.call
    sound = int(residual.escapes[0])
    short = dataclasses.replace(residual, escapes=residual.escapes - 5)
    assert join_planes(draft, short, step, target).tolist() == [sound]
    # The last five escapes are values; 0xFF is what stands behind the list.
    own = target.slots[target.places[0].long()]
    exponents = bits_of(target.v_buffer)[own, 0].int() >> 7 & 0xFF
    wanted = bits_of(case.parts[0][1])[0].int() >> 7 & 0xFF
    assert (exponents != wanted).sum() <= 5
    assert exponents[exponents != wanted].tolist() == [0] * int(
        (exponents != wanted).sum()
    )
    assert (exponents != wanted).any()


def test_a_segment_without_tokens_writes_nothing():
    case = built(SplitPlanes(3, 1), torch.bfloat16, (2, 8, 8), (4,))
    draft, residual, step, target = case.call
    none = dataclasses.replace(draft, tokens=draft.tokens * 0)
    before = target.k_buffer.clone()
    assert join_planes(none, residual, step, target).tolist() == [0]
    assert torch.equal(bits_of(target.k_buffer), bits_of(before))


def test_bytes_moved_are_those_of_both_planes_and_the_entries():
    case = built(SplitPlanes(3, 1, 16), torch.bfloat16, (2, 16, 8), (32, 16))
    _, residual, step, target = case.call
    escapes = int(residual.escapes.sum())
    # 2 heads * 48 tokens: 24 numbers of 5 + 6 bits read and 16 written; 3 blocks of 16
    # key exponents and an exponent a value; 4-byte places, and 8 bytes a token's slot.
    numbers_bytes = 2 * 48 * 24 * (5 + 6 + 16) // 8
    shared = 2 * (3 * 16 + 48)
    indices = 2 * 48 * 4 + 48 * 8
    moved = bytes_moved(step, target, 48, 2, escapes)
    assert moved == numbers_bytes + shared + indices + escapes


def changed(**changes):
    """Return a sound call with fields of its records replaced, by record."""
    records = built(SplitPlanes(3, 1), torch.bfloat16, (2, 8, 8), (4,)).call
    names = ("draft", "residual", "step", "target")
    return [
        dataclasses.replace(record, **changes.get(name, {}))
        for name, record in zip(names, records, strict=True)
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"draft": {"offsets": torch.zeros(1, 3).long()}},
            r"draft.offsets must be \(1, 4\)",
        ),
        (
            {"residual": {"offsets": torch.zeros(1, 4).long()}},
            r"residual.offsets must be \(1, 3\)",
        ),
        ({"residual": {"escapes": torch.zeros(2)}}, r"residual.escapes must be \(1,\)"),
        ({"target": {"first": torch.zeros(2)}}, r"target.first must be \(1,\)"),
        ({"target": {"k_buffer": torch.zeros(9, 2, 8).double()}}, "KV is torch.float6"),
        ({"target": {"v_buffer": torch.zeros(9, 2, 8)}}, "values torch.float32"),
        (
            {"target": {"k_buffer": torch.zeros(9, 3, 8).bfloat16()}},
            r"keys must be \[slots, 2, D\]",
        ),
        (
            {"target": {"v_buffer": torch.zeros(9, 2, 24).bfloat16()}},
            "values: D must be a power of two, 8 to 256, is 24",
        ),
        ({"target": {"places": torch.zeros(4, 2).int().t()}}, "must be contiguous"),
        ({"target": {"most_tokens": 0}}, "most_tokens must be >= 1"),
        ({"step": {"block": 24}}, "multiple of 16 tokens, got 24"),
        ({"step": {"mantissa_bits": 7}}, "mantissa_bits 7 is not below 7"),
        ({"step": {"mantissa_bits": 6}}, "more than 8 bits"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(next(iter(value))),
)
def test_misfits_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        join_planes(*changed(**changes))


def test_the_kernel_equals_the_reference():
    seen = run(__file__)
    assert seen["escapes"] > 1000
    assert set(seen["dtypes"]) == {str(dtype) for dtype in STEPS}


SEEN = {"escapes": 0, "dtypes": []}


def compare(case):
    """Run kernel and reference on the same planes; buffers must agree to the bit."""
    from vericache_kernels.join_planes.triton_impl import launch

    own, expected = moved(case.call), case.again()
    with unsynced():
        found = launch(*own)
    assert torch.equal(found.cpu(), join_rows(*expected))
    for name in ("k_buffer", "v_buffer"):
        sides = (bits_of(getattr(call[3], name)).cpu() for call in (own, expected))
        assert torch.equal(*sides)
    SEEN["escapes"] += int(found.sum())
    SEEN["dtypes"].append(str(expected[3].k_buffer.dtype))


@settings(max_examples=14, deadline=None, derandomize=True)
@given(case=cases())
def kernel_equals_reference(case):
    compare(case)


def kernel_is_right_where_planes_are_damaged():
    """Fewer exponents listed than escaped, and a segment without tokens."""
    case = built(SplitPlanes(3, 1, 16), torch.bfloat16, (2, 8, 16), (40, 20), wild=0.5)
    draft, residual, step, target = case.call
    short = dataclasses.replace(residual, escapes=residual.escapes - 50)
    compare(dataclasses.replace(case, call=(draft, short, step, target)))
    none = dataclasses.replace(draft, tokens=draft.tokens * torch.tensor([0, 1]).int())
    compare(dataclasses.replace(case, call=(none, residual, step, target)))


if __name__ == "__main__":
    kernel_equals_reference()
    kernel_is_right_where_planes_are_damaged()
    report(SEEN)
