"""Torch reference of ``join_planes``, per segment; reads lengths on the host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vericache_kernels.join_planes.planes import FORMATS

if TYPE_CHECKING:
    from vericache_kernels.join_planes.planes import DraftPlanes, PlaneTarget, Residuals
    from vericache_kernels.packed_attention.steps import SplitPlanesStep


def join_rows(
    draft: DraftPlanes, residual: Residuals, step: SplitPlanesStep, target: PlaneTarget
) -> torch.Tensor:
    """See ``join_planes``."""
    found = torch.zeros(len(draft.tokens), dtype=torch.int32)
    heads = torch.arange(target.places.shape[0])
    for segment, tokens in enumerate(draft.tokens.tolist()):
        reader = _Reader(draft, residual, step, target, segment)
        first = int(target.first[segment])
        slots = target.slots[target.places[:, first : first + tokens].long()]
        taken = 0
        for side, buffer in enumerate((target.k_buffer, target.v_buffer)):
            bits, escapes = reader.numbers(side, buffer.shape[2], taken)
            buffer.view(FORMATS[buffer.dtype].integer)[slots, heads[:, None]] = bits
            taken += escapes
        found[segment] = taken
    return found


class _Reader:
    """Reads the fields of one segment.

    Args:
        draft: See ``join_planes``.
        residual: See ``join_planes``.
        step: See ``join_planes``.
        target: See ``join_planes``.
        segment: Index of the segment.
    """

    def __init__(
        self,
        draft: DraftPlanes,
        residual: Residuals,
        step: SplitPlanesStep,
        target: PlaneTarget,
        segment: int,
    ) -> None:
        self._draft = draft
        self._residual = residual
        self._step = step
        self._segment = segment
        self._heads = target.places.shape[0]
        self._tokens = int(draft.tokens[segment])
        self._form = FORMATS[target.k_buffer.dtype]

    def numbers(self, side: int, dim: int, taken: int) -> tuple[torch.Tensor, int]:
        """Return the bits of keys or values, and their escapes.

        Args:
            side: 0 for keys, 1 for values.
            dim: D or Dv.
            taken: Number of escapes before these.

        Returns:
            [H, t, D] integers of the format's size, and the number of escapes.
        """
        step, form = self._step, self._form
        codes = self._codes(side, dim)
        distance = codes >> step.mantissa_bits & (1 << step.exponent_bits) - 1
        escaped = distance == (1 << step.exponent_bits) - 1
        exponent = self._shared(side, dim) - distance
        count = int(escaped.sum())
        exponent[escaped] = self._listed(taken, count)
        rest = form.mantissa - step.mantissa_bits
        mantissa = (codes & (1 << step.mantissa_bits) - 1) << rest
        mantissa |= self._low(side, dim, rest)
        sign = codes >> step.exponent_bits + step.mantissa_bits
        bits = sign << form.exponent + form.mantissa
        bits |= exponent << form.mantissa | mantissa
        return bits.to(form.integer), count

    def _codes(self, side: int, dim: int) -> torch.Tensor:
        """Return the codes [H, t, D] int64."""
        width = 1 + self._step.exponent_bits + self._step.mantissa_bits
        return self._draft_field(2 * side, self._tokens, width, dim)

    def _shared(self, side: int, dim: int) -> torch.Tensor:
        """Return the shared exponents, keys' [H, t, D], values' [H, t, 1], int64."""
        if side:
            values = self._draft_field(3, 1, self._form.exponent, self._tokens)
            return values.view(self._heads, self._tokens, 1)
        block = self._step.block
        blocks = -(-self._tokens // block)
        shared = self._draft_field(1, blocks, self._form.exponent, dim)
        return shared[:, torch.arange(self._tokens) // block]

    def _draft_field(
        self, field: int, rows: int, width: int, count: int
    ) -> torch.Tensor:
        """Return a field of [H, rows] rows of ``count`` codes: [H, rows, count]."""
        source = (self._draft.key_bytes, self._draft.value_bytes)[field // 2]
        start = int(self._draft.offsets[self._segment, field])
        shape = (self._heads, rows, _bytes(count, width))
        packed = source[start : start + math.prod(shape)].view(shape)
        return _codes_of(packed, width, count)

    def _low(self, side: int, dim: int, rest: int) -> torch.Tensor:
        """Return the low ``rest`` mantissa bits [H, t, D] int64."""
        start = int(self._residual.offsets[self._segment, side])
        shape = (self._heads, self._tokens, _bytes(dim, rest))
        end = start + math.prod(shape)
        packed = self._residual.plane_bytes[start:end].view(shape)
        low = torch.zeros(*shape[:2], dim, dtype=torch.int64)
        for plane in range(rest // 8):
            low |= packed[..., plane * dim : (plane + 1) * dim].long() << 8 * plane
        top = _codes_of(packed[..., rest // 8 * dim :], rest % 8, dim)
        return low | top << rest // 8 * 8

    def _listed(self, first: int, count: int) -> torch.Tensor:
        """Return [count] exponents from the list, 0 past its end, int64."""
        width, end = self._form.exponent, int(self._residual.escapes[self._segment])
        start = int(self._residual.offsets[self._segment, 2])
        packed = self._residual.plane_bytes[start : start + _bytes(end, width)]
        listed = torch.zeros(max(end, first + count), dtype=torch.int64)
        listed[:end] = _codes_of(packed, width, end)
        return listed[first : first + count]


def _bytes(count: int, width: int) -> int:
    return -(-count * width // 8)


def _codes_of(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Return int64 codes, ``count`` per row of bytes, of ``width`` bits each."""
    bits = packed[..., None].long() >> torch.arange(8) & 1
    bits = bits.flatten(-2)[..., : count * width]
    digits = bits.reshape(*packed.shape[:-1], count, width)
    return (digits << torch.arange(width)).sum(-1)
