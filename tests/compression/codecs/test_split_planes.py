"""Split planes: every bit comes back, drafts and sizes are what the format says."""

import dataclasses
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.compression.codecs.residual_planes import (
    encode_residuals,
    escape_bytes,
)
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.errors import CompressionError

INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}
FIELDS = {torch.bfloat16: (8, 7), torch.float16: (5, 10), torch.float32: (8, 23)}
DTYPES = list(FIELDS)
PLANES = [(4, 3), (4, 0), (3, 2), (3, 1), (3, 0), (5, 2), (2, 2), (1, 0), (1, 6)]


def any_bits(shape, dtype, seed):
    """Draw every bit pattern alike: subnormals, infinities and NaN payloads too."""
    generator = torch.Generator().manual_seed(seed)
    size = 8 * dtype.itemsize
    bits = torch.randint(
        -(2 ** (size - 1)), 2 ** (size - 1), shape, generator=generator
    )
    return bits.to(INTEGERS[dtype]).view(dtype)


def usual(shape, dtype, seed):
    """Draw numbers like those of a KV cache: channels of different size."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-3, 4, (shape[0], 1, shape[2]), generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(scale)).to(dtype)


def same_bits(left, right):
    integer = INTEGERS[left.dtype]
    return left.dtype == right.dtype and torch.equal(
        left.view(integer), right.view(integer)
    )


def is_exact(codec, keys, values):
    draft, residual = codec.encode(keys, values)
    joined = codec.join(draft, residual)
    return same_bits(joined[0], keys) and same_bits(joined[1], values)


@given(st.data(), st.sampled_from(DTYPES), st.sampled_from(PLANES))
@settings(max_examples=150, deadline=None)
def test_every_bit_of_chosen_patterns_comes_back(data, dtype, plane):
    size = 8 * dtype.itemsize
    exponent, mantissa = FIELDS[dtype]
    special = [0, 1, (1 << mantissa) - 1, 1 << mantissa, (1 << size - 1) - 1]
    special += [(1 << exponent) - 1 << mantissa, (1 << exponent) - 2 << mantissa]
    pattern = st.sampled_from(special) | st.integers(0, (1 << size - 1) - 1)
    pattern = st.tuples(pattern, st.booleans()).map(
        lambda drawn: drawn[0] - (drawn[1] << size - 1)
    )
    heads, tokens = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 9))
    parts = []
    for dim in (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))):
        count = heads * tokens * dim
        drawn = data.draw(st.lists(pattern, min_size=count, max_size=count))
        bits = torch.tensor(drawn).to(INTEGERS[dtype])
        parts.append(bits.view(dtype).view(heads, tokens, dim))
    assert is_exact(SplitPlanes(*plane, block=4), *parts)


def number_fields(number, dtype):
    """Read sign, exponent field and fraction of one number with Python's own tools."""
    exponent_bits, mantissa_bits = FIELDS[dtype]
    if dtype == torch.float16:
        bits = int.from_bytes(struct.pack(">e", number), "big")
    else:
        bits = int.from_bytes(struct.pack(">f", number), "big")
        bits >>= 23 - mantissa_bits
    return (
        bits >> exponent_bits + mantissa_bits,
        bits >> mantissa_bits & (1 << exponent_bits) - 1,
        bits & (1 << mantissa_bits) - 1,
    )


def hand_draft(number, shared, dtype, exponent_bits, mantissa_bits):
    """Draft one number: the middle of what shares its code, in exact arithmetic."""
    sign, exponent, fraction = number_fields(number, dtype)
    distance = shared - exponent
    if not 0 <= distance < 2**exponent_bits - 1:
        return -0.0 if sign else 0.0
    width, full = FIELDS[dtype]
    bias = 2 ** (width - 1) - 1
    cell = 2 ** (full - mantissa_bits)
    bottom = fraction // cell * cell
    if exponent == 0:
        size = math.ldexp(bottom, 1 - bias - full)
    else:
        size = math.ldexp(2**full + bottom + cell / 2, exponent - bias - full)
    return -size if sign else size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("exponent", "mantissa"), [(4, 3), (3, 1), (3, 0), (2, 4)])
def test_drafts_equal_the_oracle(dtype, exponent, mantissa):
    block, shape = 4, (2, 10, 3)
    keys, values = usual(shape, dtype, 3), any_bits(shape, dtype, 4)
    tiny = torch.finfo(dtype).smallest_normal
    keys[0, :4, 0] = torch.tensor([0.0, -0.0, tiny / 2, -tiny * 1.5]).to(dtype)
    keys[0, 4, 1] = torch.inf
    values[1, 1] = torch.tensor([tiny / 4, 0.0, -tiny / 2]).to(dtype)
    codec = SplitPlanes(exponent, mantissa, block)
    drafted = codec.decode(codec.encode(keys, values)[0])
    top = 2 ** FIELDS[dtype][0] - 1

    def biased(numbers):
        fields = [number_fields(x, dtype)[1] for x in numbers]
        return max((field for field in fields if field != top), default=0)

    for h in range(2):
        for t in range(10):
            start = t // block * block
            for d in range(3):
                shared = biased(keys[h, start : start + block, d].tolist())
                number = float(keys[h, t, d])
                wanted = hand_draft(number, shared, dtype, exponent, mantissa)
                assert float(drafted[0][h, t, d]) == wanted
                shared = biased(values[h, t].tolist())
                number = float(values[h, t, d])
                wanted = hand_draft(number, shared, dtype, exponent, mantissa)
                assert float(drafted[1][h, t, d]) == wanted


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(0, 2**31),
)
def test_draft_errors_are_bounded(dtype, exponent, mantissa, seed):
    keys, values = usual((2, 70, 8), dtype, seed), any_bits((2, 70, 8), dtype, seed)
    codec = SplitPlanes(exponent, mantissa)
    drafted = codec.decode(codec.encode(keys, values)[0])
    smallest = torch.finfo(dtype).smallest_normal
    for entries, approximate in zip((keys, values), drafted, strict=True):
        assert torch.isfinite(approximate).all()
        exact, near = entries.double(), approximate.double()
        power = torch.exp2(torch.floor(torch.log2(exact.abs())))
        inside = (near != 0) & (exact.abs() >= smallest)
        error = (near - exact).abs()
        assert (error <= power * 2.0 ** -(mantissa + 1))[inside].all()
        assert (torch.signbit(near) == torch.signbit(exact)).all()
    # What is drafted as zero is smaller than the block's largest by 2^(escape - 1).
    lost = (drafted[0] == 0) & (keys.abs() >= smallest)
    largest = torch.cat(
        [b.abs().amax(1, True).expand_as(b) for b in keys.split(64, 1)], 1
    )
    assert (keys.abs().double() * 2.0 ** (2**exponent - 2) < largest.double())[
        lost
    ].all()


def escape_count(blocks, dim, exponent_bits):
    """Count finite numbers too far below the largest of their block along ``dim``."""
    count = 0
    for block in blocks:
        smallest = math.log2(torch.finfo(block.dtype).smallest_normal)
        power = torch.frexp(block.double().abs())[1] - 1
        power = power.where(block != 0, smallest - 1).clamp(min=smallest - 1)
        distance = power.amax(dim, keepdim=True) - power
        count += int((distance >= 2**exponent_bits - 1).sum())
    return count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("exponent", "mantissa"), PLANES)
@pytest.mark.parametrize("shape", [(2, 128, 64), (1, 70, 5), (3, 3, 32)])
def test_sizes_are_what_the_bits_say(dtype, exponent, mantissa, shape):
    heads, tokens, dim = shape
    codec = SplitPlanes(exponent, mantissa)
    keys, values = usual(shape, dtype, 5), usual(shape, dtype, 6)
    draft, residual = codec.encode(keys, values)
    field, fraction = FIELDS[dtype]
    codes = -(-dim * (1 + exponent + mantissa) // 8) * 2 * heads * tokens
    key_shared = heads * -(-tokens // 64) * -(-dim * field // 8)
    value_shared = heads * -(-tokens * field // 8)
    assert draft.nbytes == codes + key_shared + value_shared
    rest = -(-dim * (fraction - mantissa) // 8) * 2 * heads * tokens
    lost = escape_count(keys.split(64, dim=1), 1, exponent)
    lost += escape_count([values], 2, exponent)
    assert draft.part_shape.escapes == lost
    assert residual.nbytes == rest + -(-lost * field // 8)
    elements = 2 * heads * tokens * dim
    assert (
        draft.bits == codec.draft_bits(draft.part_shape) == 8 * draft.nbytes / elements
    )
    assert codec.transfer_fraction(residual.part_shape) == residual.nbytes / (
        keys.nbytes + values.nbytes
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cut_at_whole_blocks_changes_nothing(dtype):
    codec = SplitPlanes(3, 1)
    keys, values = any_bits((2, 200, 16), dtype, 7), any_bits((2, 200, 16), dtype, 8)
    cut = 2 * codec.needs.token_align
    whole = codec.decode(codec.encode(keys, values)[0])
    first = codec.decode(codec.encode(keys[:, :cut], values[:, :cut])[0])
    last = codec.decode(codec.encode(keys[:, cut:], values[:, cut:])[0])
    for together, left, right in zip(whole, first, last, strict=True):
        assert same_bits(together, torch.cat([left, right], dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [16, 32, 48 * 16, 37 * 16 + 5, 7])
@pytest.mark.parametrize("draw", [any_bits, usual])
def test_residuals_of_many_segments_are_those_of_each(dtype, tokens, draw):
    codec, segment = SplitPlanes(3, 1, 16), 32
    keys, values = draw((2, tokens, 8), dtype, 1), draw((2, tokens, 6), dtype, 2)
    planes = encode_residuals(codec, keys, values, segment)
    width, taken = FIELDS[dtype][0], 0
    rest: dict[str, list] = {"key_rest": [], "value_rest": []}
    for i, start in enumerate(range(0, tokens, segment)):
        part = slice(start, start + segment)
        _, residual = codec.encode(keys[:, part], values[:, part])
        for name, found in rest.items():
            found.append(residual.tensors[name].flatten())
        count = residual.part_shape.escapes
        assert planes.counts[i] == count
        own = planes.escapes[taken : taken + math.ceil(count * width / 8)]
        whole = count * width // 8  # behind the last escape are zeros, or none
        assert torch.equal(own[:whole], residual.tensors["escapes"][:whole])
        taken += escape_bytes(count, width)
    for name, found in rest.items():
        assert torch.equal(getattr(planes, name), torch.cat(found))


def test_zeros_are_drafted_exactly_and_cost_no_escape():
    keys = torch.zeros(1, 70, 8, dtype=torch.float16)
    keys[0, 1] = -0.0
    codec = SplitPlanes(3, 0)
    draft, _ = codec.encode(keys, keys)
    assert draft.part_shape.escapes == 0
    assert all(same_bits(near, keys) for near in codec.decode(draft))


def test_the_kv_is_not_modified_and_may_be_strided():
    wide = any_bits((60, 2, 32), torch.bfloat16, 9)
    keys, values = wide[..., :16].transpose(0, 1), wide[..., 16:].transpose(0, 1)
    before = wide.clone()
    assert is_exact(SplitPlanes(), keys, values)
    assert same_bits(wide, before)


def encoded(escaped=False):
    keys = torch.ones(1, 8, 8, dtype=torch.bfloat16)
    keys[0, 0, 0] = torch.inf if escaped else 1
    return SplitPlanes().encode(keys, keys)


def test_a_residual_of_other_kv_is_refused():
    draft, _ = encoded()
    other_draft, other_residual = encoded(escaped=True)
    with pytest.raises(CompressionError, match="do not belong together"):
        SplitPlanes().join(draft, other_residual)
    forged = dataclasses.replace(draft, part_shape=other_draft.part_shape)
    with pytest.raises(CompressionError, match="0 escapes, the residual lists 2"):
        SplitPlanes().join(forged, other_residual)
