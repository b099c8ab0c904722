"""Encodes ``split-planes`` residuals of many segments without a host sync."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from vericache_sglang.compression.codecs.floats import FORMATS
from vericache_sglang.compression.codecs.packing import pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vericache_sglang.compression.codecs.split_planes import SplitPlanes

Count = TypeVar("Count", int, torch.Tensor)

ESCAPE_ALIGN = 128
"""Alignment of a segment's escapes, in exponents: 16 bytes at 1 bit per exponent."""

AT_ONCE = 8
"""Segments per batch; more take more memory, fewer take more kernel launches."""

SPREAD = 1 << 16
"""Number of discard positions over which writes of unlisted numbers are spread."""


class Planes(NamedTuple):
    """The residuals of S segments of one layer, uint8 on the KV's device.

    Attributes:
        key_rest: [*], the other mantissa bits [H, t, *] of every segment's keys.
        value_rest: [*], likewise of the values.
        escapes: [*], exponents of escaped numbers, packed, segment after segment; each
            segment begins at a multiple of ``ESCAPE_ALIGN`` exponents.
        counts: [S] int32, escaped numbers of every segment.
    """

    key_rest: torch.Tensor
    value_rest: torch.Tensor
    escapes: torch.Tensor
    counts: torch.Tensor


def encode_residuals(
    codec: SplitPlanes, keys: torch.Tensor, values: torch.Tensor, segment: int
) -> Planes:
    """Encode the residuals of consecutive segments without a host sync.

    Only the device knows the number of escaped numbers, so the tensor of their
    exponents has room for all numbers.

    Args:
        keys: [H, T, D], T >= 1, in segments of ``segment`` tokens and a shorter
            last one.
        values: [H, T, Dv].
        segment: Tokens of a segment, a multiple of the codec's block.
    """
    form = FORMATS[keys.dtype]
    heads, tokens = keys.shape[:2]
    width = heads * (keys.shape[2] + values.shape[2])
    each = [min(segment, tokens - start) for start in range(0, tokens, segment)]
    most = sum(_aligned(width * count) for count in each)
    listed = torch.zeros(most + SPREAD, dtype=torch.uint8, device=keys.device)
    taken = torch.zeros((), dtype=torch.int64, device=keys.device)
    rest: dict[str, list[torch.Tensor]] = {"key": [], "value": []}
    counts = []
    for start, stop in _bounds(tokens, segment):
        by_segment = partial(_by_segment, tokens=min(segment, stop - start))
        numbers, escaped = [], []
        for field, side in codec.sides(keys[:, start:stop], values[:, start:stop]):
            rest[field].append(by_segment(codec.low_bits(side, form)).view(-1))
            numbers.append(by_segment(side.exponent.to(torch.uint8)))
            escaped.append(by_segment(side.escaped))
        mask = torch.cat(escaped, dim=1)
        before = mask.cumsum(1)
        count = before[:, -1]
        room = _aligned(count)
        first = taken + room.cumsum(0) - room
        # Numbers without an escape are written past the end, spread over positions.
        behind = torch.arange(mask.shape[1], device=mask.device) % SPREAD + most
        place = torch.where(mask, first[:, None] + before - 1, behind)
        listed.scatter_(0, place.view(-1), torch.cat(numbers, dim=1).view(-1))
        taken = taken + room.sum()
        counts.append(count)
    return Planes(
        torch.cat(rest["key"]),
        torch.cat(rest["value"]),
        pack(listed[:most], form.exponent),
        torch.cat(counts).to(torch.int32),
    )


def escape_bytes(counts: Count, exponent_bits: int) -> Count:
    """Return the sizes of segments in ``Planes.escapes``, in bytes.

    Args:
        counts: Number of escapes of each segment.
        exponent_bits: Width of an exponent.
    """
    return _aligned(counts) * exponent_bits // 8


def _aligned(count: Count) -> Count:
    return (count + ESCAPE_ALIGN - 1) // ESCAPE_ALIGN * ESCAPE_ALIGN


def _bounds(tokens: int, segment: int) -> Iterator[tuple[int, int]]:
    """Split tokens into groups of whole segments, and a shorter last segment."""
    whole = tokens // segment * segment
    yield from pairwise([*range(0, whole, AT_ONCE * segment), whole])
    if whole < tokens:
        yield whole, tokens


def _by_segment(side: torch.Tensor, tokens: int) -> torch.Tensor:
    """Reorder [H, S * t, *] by segment: [S, H * t * *]."""
    heads, _, *width = side.shape
    parted = side.reshape(heads, -1, tokens, *width).transpose(0, 1)
    return parted.reshape(parted.shape[0], -1)
