"""The residuals of ``split-planes`` for many segments at once, without a host wait."""

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
"""Escapes of a segment begin at a multiple of it: 16 bytes at 1 bit an exponent."""

AT_ONCE = 8
"""Segments encoded together; more of them take more memory, fewer more launches."""

SPREAD = 1 << 16
"""Places over which numbers that are not listed are spread."""


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
    """Encode the residuals of consecutive segments; the host reads nothing.

    How many numbers are escaped is known to the device alone, so their exponents
    come in a tensor with room for all.

    Args:
        codec: Whose residuals they are.
        keys: [H, T, D], T >= 1, in segments of ``segment`` tokens and a shorter
            last one.
        values: [H, T, Dv].
        segment: A multiple of the codec's block.
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
        # What is not escaped goes behind the end, and not all to one place.
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
    """Return the bytes of ``Planes.escapes`` that segments take.

    Args:
        counts: Escapes of segments.
        exponent_bits: Of an exponent.
    """
    return _aligned(counts) * exponent_bits // 8


def _aligned(count: Count) -> Count:
    return (count + ESCAPE_ALIGN - 1) // ESCAPE_ALIGN * ESCAPE_ALIGN


def _bounds(tokens: int, segment: int) -> Iterator[tuple[int, int]]:
    """Cut tokens into groups of whole segments, and a shorter last segment."""
    whole = tokens // segment * segment
    yield from pairwise([*range(0, whole, AT_ONCE * segment), whole])
    if whole < tokens:
        yield whole, tokens


def _by_segment(side: torch.Tensor, tokens: int) -> torch.Tensor:
    """Bring [H, S * t, *] into the order of segments: [S, H * t * *]."""
    heads, _, *width = side.shape
    parted = side.reshape(heads, -1, tokens, *width).transpose(0, 1)
    return parted.reshape(parted.shape[0], -1)
