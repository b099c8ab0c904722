"""Packed draft parts inside ordinary KV slots: a slot is so many bytes, nothing more.

A codec's draft part is a few tensors of fixed shape. Laid end to end they fill whole
slots of SGLang's pool, in every layer the same slots, so packed and exact KV share one
pool, one allocator and one row of ``req_to_token``; parking and freeing move bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.codecs.base import Extent, Part
from vericache_sglang.memory.segments import segment_bounds
from vericache_sglang.memory.splitting import as_bits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.compression.codecs.base import Codec
    from vericache_sglang.memory.geometry import KVGeometry

ALIGN = 16
"""Byte offset of every tensor in a segment is a multiple of this."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Packed tokens that are written, read and decoded together.

    Attributes:
        start: First of its tokens among the packed ones.
        tokens: Tokens.
        first: First of its slots among the code slots.
        slots: Slots.
        extent: What its size depends on.
    """

    start: int
    tokens: int
    first: int
    slots: int
    extent: Extent


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
    def segments(self) -> tuple[Segment, ...]:
        """All segments in order; the last one may be shorter."""
        found, first = [], 0
        for start, stop in segment_bounds(self.coded):
            extent = self._extent(stop - start)
            slots = -(-self._image_bytes(extent) // self._slot_bytes)
            found.append(Segment(start, extent.tokens, first, slots, extent))
            first += slots
        return tuple(found)

    @cached_property
    def slots(self) -> int:
        """Code slots of the prompt, in whole pages."""
        page = self.geometry.page_size
        used = sum(segment.slots for segment in self.segments)
        return -(-used // page) * page

    def write(
        self,
        segment: Segment,
        buffers: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        part: Part,
    ) -> None:
        """Write one layer's draft part of a segment.

        Args:
            segment: Which.
            buffers: Keys [slots of the pool, H, D] and values of the layer.
            slots: [code slots] int64 of the prompt.
            part: Its draft part.
        """
        image = torch.zeros(
            segment.slots * self._slot_bytes,
            dtype=torch.uint8,
            device=buffers[0].device,
        )
        offset = 0
        for name in self.codec.draft_layout(segment.extent):
            content = part.tensors[name].contiguous().view(torch.uint8).flatten()
            image[offset : offset + content.numel()] = content
            offset += _aligned(content.numel())
        places = slots[segment.first : segment.first + segment.slots]
        offset = 0
        for buffer in buffers:
            rows = buffer.view(torch.uint8).view(len(buffer), -1)
            end = offset + segment.slots * rows.shape[1]
            rows[places] = image[offset:end].view(segment.slots, -1)
            offset = end

    def read(
        self,
        segment: Segment,
        buffers: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        layer: int,
        positions: torch.Tensor | None,
    ) -> Part:
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
        image = torch.cat([_rows(buffer, places).flatten() for buffer in buffers])
        return Part(
            self.codec.identity,
            segment.extent,
            layer,
            positions,
            self._fields(segment.extent, image),
        )

    def _fields(
        self, extent: Extent, image: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        fields, offset = {}, 0
        for name, (dtype, shape) in self.codec.draft_layout(extent).items():
            size = dtype.itemsize * math.prod(shape)
            fields[name] = image[offset : offset + size].view(dtype).view(shape)
            offset += _aligned(size)
        return fields

    def _extent(self, tokens: int) -> Extent:
        geometry = self.geometry
        return Extent(
            heads=geometry.kv_heads,
            tokens=tokens,
            key_dim=geometry.head_dim,
            value_dim=geometry.v_head_dim,
            dtype=self.dtype,
        )

    def _image_bytes(self, extent: Extent) -> int:
        fields = self.codec.draft_layout(extent).values()
        sizes = (dtype.itemsize * math.prod(shape) for dtype, shape in fields)
        return sum(map(_aligned, sizes))

    @property
    def _slot_bytes(self) -> int:
        """Bytes of one slot in one layer, key and value."""
        return self.geometry.token_bytes // self.geometry.layers


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _rows(buffer: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a layer's slots; a view where they are consecutive."""
    first, last = int(places[0]), int(places[-1])
    run = last - first + 1 == len(places) and bool((places.diff() == 1).all())
    entries = buffer[first : last + 1] if run else as_bits(buffer)[places]
    return entries.reshape(len(places), -1).view(torch.uint8)
