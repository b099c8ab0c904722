"""Records of ``join_planes``: draft planes, residual planes and destination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class PlaneFormat(NamedTuple):
    """Widths of a float's fields in bits (IEEE 754), and the integer of its size."""

    exponent: int
    mantissa: int
    integer: torch.dtype


FORMATS = {
    torch.bfloat16: PlaneFormat(8, 7, torch.int16),
    torch.float16: PlaneFormat(5, 10, torch.int16),
    torch.float32: PlaneFormat(8, 23, torch.int32),
}


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlanes:
    """The draft KV of S segments of one layer, as for ``packed_attention``.

    Attributes:
        key_bytes: [*] uint8, buffer of the key fields.
        value_bytes: [*] uint8, buffer of the value fields; may be ``key_bytes``.
        offsets: [S, 4] int64, bytes, multiples of 16: key codes [H, t, *], key shared
            exponents [H, blocks, *], value codes [H, t, *], value shared exponents
            [H, *]; each row of each field is packed separately, little-endian.
        tokens: [S] int32, t of each segment, >= 0.
    """

    key_bytes: torch.Tensor
    value_bytes: torch.Tensor
    offsets: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """The residuals of the same segments.

    Attributes:
        plane_bytes: [*] uint8, buffer of the residuals.
        offsets: [S, 3] int64, bytes, multiples of 16: the remaining mantissa bits of
            the keys [H, t, *] and of the values, as full byte planes followed by packed
            bits; the exponents of escaped numbers, packed, in the order of [H, t, D],
            keys first.
        escapes: [S] int32, number of listed exponents.
    """

    plane_bytes: torch.Tensor
    offsets: torch.Tensor
    escapes: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PlaneTarget:
    """Destination of the entries of one layer.

    Token i of segment s in head h is written to ``slots[places[h, first[s] + i]]``.

    Attributes:
        k_buffer: [slots, H, D] bfloat16, float16 or float32, contiguous in D; D a
            power of two from 8 to 256.
        v_buffer: [slots, H, Dv], likewise.
        slots: [*] int64 pool slots.
        places: [H, C] int32 or int64, contiguous, indices into ``slots``.
        first: [S] int32 or int64, column of a segment's first token in ``places``.
        most_tokens: Maximum tokens of a segment; determines the grid.
    """

    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor
    first: torch.Tensor
    most_tokens: int
