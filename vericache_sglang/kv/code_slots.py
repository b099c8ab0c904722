"""Packed draft parts inside ordinary KV slots: a slot is so many bytes, nothing more.

A codec's draft part is a few tensors of fixed shape. Laid end to end they fill whole
slots of SGLang's pool, in every layer the same slots, so packed and exact KV share one
pool, one allocator and one row of ``req_to_token``; parking and freeing move bytes.
Fields whose names begin with "value" lie where values do, all others where keys do: so
attention gathers either in one pass.
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
"""Byte offset of every tensor in a segment is a multiple of this."""


@dataclass(frozen=True, slots=True)
class CodeSegment:
    """Packed tokens that are written, read and decoded together.

    Attributes:
        start: First of its tokens among the packed ones.
        tokens: Tokens.
        first: First of its slots among the code slots.
        slots: Slots.
        part_shape: What its size depends on.
    """

    start: int
    tokens: int
    first: int
    slots: int
    part_shape: PartShape


@dataclass(frozen=True)
class CodeLayout:
    """Where the packed tokens of one prompt lie among its code slots.

    Attributes:
        codec: Whose draft parts they are.
        geometry: Shapes of the pool.
        dtype: Of the pool.
        coded: Packed tokens of each head.
    """

    codec: Codec
    geometry: KVGeometry
    dtype: torch.dtype
    coded: int

    @cached_property
    def segments(self) -> tuple[CodeSegment, ...]:
        """All segments in order; the last one may be shorter."""
        found, first = [], 0
        for start, stop in segment_bounds(self.coded):
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
            first += slots
        return tuple(found)

    @cached_property
    def slots(self) -> int:
        """Code slots of the prompt, in whole pages."""
        page = self.geometry.page_size
        used = sum(segment.slots for segment in self.segments)
        return -(-used // page) * page

    def offsets(self, segment: CodeSegment) -> dict[str, int]:
        """Return where each field begins in a segment's keys or values, in bytes."""
        keys, values = (offsets for offsets, _ in self._halves(segment.part_shape))
        return keys | values

    def write(
        self,
        segment: CodeSegment,
        buffers: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        part: PartSpec,
    ) -> None:
        """Write one layer's draft part of a segment.

        Args:
            segment: Which.
            buffers: Keys [slots of the pool, H, D] and values of the layer.
            slots: [code slots] int64 of the prompt.
            part: Its draft part.
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
        """Read one layer's draft part of a segment.

        Args:
            segment: Which.
            buffers: As in ``write``.
            slots: As in ``write``.
            layer: Layer index.
            positions: [tokens] or [H, tokens] of the segment; None: the codec does not
                ask for them.
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
        """Return one layer's draft parts as bytes, segment after segment; copies.

        Args:
            buffers: As in ``write``.
            slots: As in ``write``.

        Returns:
            What lies in keys, and in values: [used slots * bytes of one] uint8 each.
        """
        used = slots[: sum(segment.slots for segment in self.segments)]
        keys, values = (
            as_bits(buffer).index_select(0, used).view(torch.uint8).view(-1)
            for buffer in buffers
        )
        return keys, values

    def _halves(self, part_shape: PartShape) -> list[tuple[dict[str, int], int]]:
        """Return, of keys and of values, where each field begins, and all bytes."""
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
        """Bytes of a slot in one layer, of its key and of its value."""
        geometry = self.geometry
        row = geometry.kv_heads * geometry.element_bytes
        return row * geometry.head_dim, row * geometry.v_head_dim


def _rows(buffer: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a layer's slots; on a CPU a view where they are in a run."""
    entries = None
    if buffer.device.type == "cpu":
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == len(places) and bool((places.diff() == 1).all()):
            entries = buffer[first : last + 1]
    if entries is None:
        entries = as_bits(buffer)[places]
    return entries.reshape(len(places), -1).view(torch.uint8)
