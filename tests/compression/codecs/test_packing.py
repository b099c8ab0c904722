"""Bit packing against Python's own big integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.compression.codecs.packing import (
    pack,
    pack_wide,
    packed_bytes,
    unpack,
    unpack_wide,
)
from vericache_sglang.errors import CompressionError


def as_bytes(codes: list[int], bits: int) -> list[int]:
    """Lay the codes out in one big integer and read its bytes."""
    number = sum(code << place * bits for place, code in enumerate(codes))
    return list(number.to_bytes(-(-len(codes) * bits // 8), "little"))


@st.composite
def rows(draw, widths):
    bits = draw(st.sampled_from(widths))
    count = draw(st.integers(0, 40))
    row = st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count)
    return bits, count, draw(st.lists(row, min_size=1, max_size=3))


@given(rows(range(1, 9)))
def test_bytes_are_those_of_one_big_integer(case):
    bits, count, lists = case
    codes = torch.tensor(lists, dtype=torch.uint8).view(len(lists), count)
    packed = pack(codes, bits)
    assert packed.shape == (len(lists), packed_bytes(count, bits))
    assert packed.tolist() == [as_bytes(row, bits) for row in lists]
    assert torch.equal(unpack(packed, bits, count), codes)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", [(2, 3, 16), (2, 3, 13), (13,), (0, 5), (4, 0)])
def test_every_shape_comes_back(bits, shape):
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (*shape[:-1], -(-shape[-1] * bits // 8))
    assert torch.equal(unpack(packed, bits, shape[-1]), codes)


def test_strided_rows_are_packed_as_they_read():
    codes = torch.randint(0, 32, (12, 5), dtype=torch.uint8).t()
    assert torch.equal(pack(codes, 5), pack(codes.contiguous(), 5))
    packed = pack(codes.contiguous(), 5)
    spread = torch.stack([packed, packed], dim=2)[..., 0]
    assert torch.equal(unpack(spread, 5, 12), codes)


@given(rows([0, 1, 3, 7, 8, 10, 16, 20, 23, 31]))
def test_wide_codes_are_byte_planes_then_the_rest(case):
    bits, count, lists = case
    codes = torch.tensor(lists, dtype=torch.int32).view(len(lists), count)
    packed = pack_wide(codes, bits)
    whole = bits // 8
    wanted = [
        [code >> 8 * plane & 255 for plane in range(whole) for code in row]
        + as_bytes([code >> 8 * whole for code in row], bits % 8)
        for row in lists
    ]
    assert packed.tolist() == wanted
    assert packed.shape[1] == packed_bytes(count, bits)
    assert torch.equal(unpack_wide(packed, bits, count, torch.int32), codes)


@pytest.mark.parametrize(
    ("codes", "bits", "says"),
    [
        (torch.zeros(3, dtype=torch.uint8), 0, "bits must be 1 to 8, got 0"),
        (torch.zeros(3, dtype=torch.uint8), 9, "bits must be 1 to 8, got 9"),
        (torch.zeros(3, dtype=torch.int32), 3, "codes must be rows of uint8"),
        (torch.tensor(1, dtype=torch.uint8), 3, "codes must be rows of uint8"),
    ],
)
def test_what_cannot_be_packed_is_refused(codes, bits, says):
    with pytest.raises(CompressionError, match=says):
        pack(codes, bits)


def test_rows_of_another_length_are_refused():
    with pytest.raises(CompressionError, match="8 codes of 3 bits are 3 bytes"):
        unpack(torch.zeros(2, 4, dtype=torch.uint8), 3, 8)
