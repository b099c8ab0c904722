"""Packed draft KV stored as bytes in ordinary KV slots.

A codec's draft KV is a few tensors of fixed shape. Laid end to end they fill whole
slots of SGLang's pool, the same slots in every layer, so packed and exact KV share one
pool, one allocator and one block-table row; swapping out and freeing treat both alike.
Fields whose names begin with "value" are stored in the value buffer, all others in the
key buffer, so attention gathers either in one pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.codecs.base import PartShape, PartSpec
from vericache_sglang.kv.segment_length import segment_bounds
from vericache_sglang.kv.split_layers import as_bits

if TYPE_CHECKING:
    from vericache_sglang.compression.codecs.base import Codec
    from vericache_sglang.kv.geometry import KVGeometry

ALIGN = 16
"""Alignment of every tensor in a segment, in bytes."""


@dataclass(frozen=True, slots=True)
class CodeSegment:
    """Packed tokens that are written, read and decoded together.

    Attributes:
        start: Index of its first token among the packed tokens.
        tokens: Number of tokens.
        first: Index of its first slot among the code slots.
        slots: Number of slots.
        part_shape: Determines its size.
    """

    start: int
    tokens: int
    first: int
    slots: int
    part_shape: PartShape


@dataclass(frozen=True)
class CodeLayout:
    """Layout of one prompt's packed tokens in its code slots.

    Attributes:
        codec: Codec of the draft KV.
        geometry: Shapes of the pool.
        dtype: Dtype of the pool.
        coded: Packed tokens per head.
        run: See ``Budget.run``.
    """

    codec: Codec
    geometry: KVGeometry
    dtype: torch.dtype
    coded: int
    run: int = 0

    @cached_property
    def segments(self) -> tuple[CodeSegment, ...]:
        """All segments in order; the last one may be shorter."""
        found, first = [], 0
        for start, stop in segment_bounds(self.coded, self.run):
            part_shape = self._part_shape(stop - start)
            slots = max(
                -(-size // width)
                for (_, size), width in zip(
                    self._halves(part_shape), self.widths, strict=True
                )
            )
            found.append(
                CodeSegment(start, part_shape.tokens, first, slots, part_shape)
            )
            first += self._paged(slots) if self.run else slots
        return tuple(found)

    @property
    def used(self) -> int:
        """Code slots up to the last that holds codes."""
        last = self.segments[-1:]
        return sum(segment.first + segment.slots for segment in last)

    @cached_property
    def slots(self) -> int:
        """Code slots of the prompt, in whole pages."""
        return self._paged(self.used)

    def _paged(self, slots: int) -> int:
        """Round a number of slots up to whole pages."""
        page = self.geometry.page_size
        return -(-slots // page) * page

    def offsets(self, segment: CodeSegment) -> dict[str, int]:
        """Return the byte offset of each field in a segment's keys or values."""
        keys, values = (offsets for offsets, _ in self._halves(segment.part_shape))
        return keys | values

    def write(
        self,
        segment: CodeSegment,
        buffers: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        part: PartSpec,
    ) -> None:
        """Write one layer's draft KV of a segment.

        Args:
            segment: One of ``segments``.
            buffers: Keys [slots of the pool, H, D] and values of the layer.
            slots: [code slots] int64 of the prompt.
            part: Its draft KV.
        """
        places = slots[segment.first : segment.first + segment.slots]
        halves = self._halves(segment.part_shape)
        for buffer, (offsets, _) in zip(buffers, halves, strict=True):
            rows = buffer.view(torch.uint8).view(len(buffer), -1)
            image = rows.new_zeros(segment.slots * rows.shape[1])
            for name, offset in offsets.items():
                content = part.tensors[name].contiguous().view(torch.uint8).flatten()
                image[offset : offset + content.numel()] = content
            rows[places] = image.view(segment.slots, -1)

    def read(
        self,
        segment: CodeSegment,
        buffers: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        layer: int,
        positions: torch.Tensor | None,
    ) -> PartSpec:
        """Read one layer's draft KV of a segment.

        Args:
            segment: One of ``segments``.
            buffers: As in ``write``.
            slots: As in ``write``.
            layer: Layer index.
            positions: [tokens] or [H, tokens] of the segment; None: the codec does not
                need them.
        """
        places = slots[segment.first : segment.first + segment.slots]
        layout, found = self.codec.draft_layout(segment.part_shape), {}
        halves = self._halves(segment.part_shape)
        for buffer, (offsets, _) in zip(buffers, halves, strict=True):
            image = _rows(buffer, places).flatten()
            for name, offset in offsets.items():
                dtype, shape = layout[name]
                size = dtype.itemsize * math.prod(shape)
                found[name] = image[offset : offset + size].view(dtype).view(shape)
        return PartSpec(
            self.codec.identity, segment.part_shape, layer, positions, found
        )

    def images(
        self, buffers: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's draft KV as bytes, segment by segment; copies.

        Args:
            buffers: As in ``write``.
            slots: As in ``write``.

        Returns:
            Bytes of keys and of values: [used slots * bytes per slot] uint8 each.
        """
        used = slots[: self.used]
        keys, values = (
            as_bits(buffer).index_select(0, used).view(torch.uint8).view(-1)
            for buffer in buffers
        )
        return keys, values

    def _halves(self, part_shape: PartShape) -> list[tuple[dict[str, int], int]]:
        """Return field offsets and total bytes, for keys and for values."""
        halves: list[tuple[dict[str, int], int]] = [({}, 0), ({}, 0)]
        for name, (dtype, shape) in self.codec.draft_layout(part_shape).items():
            half = int(name.startswith("value"))
            offsets, offset = halves[half]
            size = dtype.itemsize * math.prod(shape)
            halves[half] = offsets | {name: offset}, offset + -(-size // ALIGN) * ALIGN
        return halves

    def _part_shape(self, tokens: int) -> PartShape:
        geometry = self.geometry
        return PartShape(
            heads=geometry.kv_heads,
            tokens=tokens,
            key_dim=geometry.head_dim,
            value_dim=geometry.v_head_dim,
            dtype=self.dtype,
        )

    @property
    def widths(self) -> tuple[int, int]:
        """Bytes of one slot in one layer: of its key and of its value."""
        geometry = self.geometry
        row = geometry.kv_heads * geometry.element_bytes
        return row * geometry.head_dim, row * geometry.v_head_dim


def _rows(buffer: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a layer's slots; on a CPU a view if they are consecutive."""
    entries = None
    if buffer.device.type == "cpu":
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == len(places) and bool((places.diff() == 1).all()):
            entries = buffer[first : last + 1]
    if entries is None:
        entries = as_bits(buffer)[places]
    return entries.reshape(len(places), -1).view(torch.uint8)
