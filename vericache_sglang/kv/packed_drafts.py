"""Packed draft KV of running requests: written once, read by every draft forward."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import torch

from vericache_kernels.join_planes import DraftPlanes
from vericache_sglang.compression.budget import code_from
from vericache_sglang.compression.codecs.base import PartShape
from vericache_sglang.errors import CompressionError
from vericache_sglang.kv.calibration import seconds_of
from vericache_sglang.kv.code_slots import CodeLayout
from vericache_sglang.kv.segment_length import SEGMENT, segment_bounds
from vericache_sglang.scheduling.plan import Residency

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_kernels.packed_attention import Segment
    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.compression.codecs.base import Codec, PartSpec
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.host_image import DraftReader
    from vericache_sglang.kv.request import Parts, RequestState


class Codes:
    """Packs, locates and decodes the packed draft KV of compressed requests.

    Args:
        codec: Bound to the model.
        handles: Pool and block table.

    Raises:
        CompressionError: Its blocks do not divide a segment.
    """

    def __init__(self, codec: Codec, handles: KVHandles) -> None:
        self.codec = codec
        self._handles = handles
        self.block = math.lcm(handles.geometry.page_size, codec.needs.token_align)
        if SEGMENT % self.block:
            raise CompressionError(
                f"--vericache-compressor: {codec.name} packs {self.block} tokens "
                f"together, which does not divide a segment of {SEGMENT}"
            )
        self.layout = cache(self._new_layout)

    @property
    def transfer_fraction(self) -> float:
        """Bytes a verification loads, over the bytes of the packed tokens' KV."""
        geometry = self._handles.geometry
        part_shape = PartShape(
            heads=geometry.kv_heads,
            tokens=SEGMENT,
            key_dim=geometry.head_dim,
            value_dim=geometry.v_head_dim,
            dtype=self._handles.host.dtype,
        )
        return self.codec.transfer_fraction(part_shape)

    def complete(self, budget: Budget) -> Budget:
        """Return the budget with as many tokens packed as fill whole blocks."""
        packed = code_from(budget, self.block)
        slots = self.layout(packed.coded).slots
        return replace(packed, code_slots=slots)

    def encode(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
    ) -> list[PartSpec]:
        """Pack tokens of one layer.

        Args:
            layer: Layer index.
            keys: [coded, H, D] of these tokens.
            values: [coded, H, Dv].
            positions: [H, coded] integers, their positions in the prompt.

        Returns:
            Packed draft KV, one part per segment.
        """
        return [
            self.codec.encode_draft(
                keys[start:stop].transpose(0, 1),
                values[start:stop].transpose(0, 1),
                layer=layer,
                positions=positions[:, start:stop],
                sinks=torch.empty(0, dtype=torch.int64),
            )
            for start, stop in segment_bounds(positions.shape[1])
        ]

    def put(self, layer: int, slots: torch.Tensor, parts: list[PartSpec]) -> None:
        """Write one layer's packed draft KV.

        Args:
            layer: Layer index.
            slots: [code slots] int64.
            parts: As ``encode`` returned them.
        """
        layout = self.layout(sum(part.part_shape.tokens for part in parts))
        for segment, part in zip(layout.segments, parts, strict=True):
            layout.write(segment, self.buffers(layer), slots, part)

    def drafts(self, state: RequestState) -> DraftReader:
        """Return a reader of a request's packed draft KV in its present slots."""
        return SlotDrafts(self, state.split, self._slots(state))

    def segments(self, state: RequestState) -> Callable[[int], list[Segment]]:
        """Return a function from layer to decoders, one per segment of the draft KV."""
        parts, slots = state.split, self._slots(state)
        count = len(self.layout(parts.budget.coded).segments)

        def decoded(layer: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.codec.decode(self.part(layer, parts, slots, i))

        return lambda layer: [partial(decoded, layer, i) for i in range(count)]

    def seconds_per_token(self) -> float:
        """Time decoding one segment of one layer; return seconds per packed token."""
        geometry, device = self._handles.geometry, self._handles.device
        shape = (SEGMENT, geometry.kv_heads, geometry.head_dim)
        keys = torch.zeros(shape, dtype=self._handles.host.dtype, device=device)
        where = torch.arange(SEGMENT, device=device).expand(geometry.kv_heads, SEGMENT)
        part = self.encode(0, keys, keys, where)[0]
        return seconds_of(lambda: self.codec.decode(part), device) / SEGMENT

    def part(self, layer: int, parts: Parts, slots: torch.Tensor, i: int) -> PartSpec:
        """Return one layer's draft KV of a segment.

        Args:
            layer: Layer index.
            parts: Parts of the request.
            slots: [code slots] int64.
            i: Index of the segment.
        """
        layout = self.layout(parts.budget.coded)
        span = layout.segments[i]
        positions = parts.coded[layer, :, span.start : span.start + span.tokens]
        return layout.read(span, self.buffers(layer), slots, layer, positions)

    def _slots(self, state: RequestState) -> torch.Tensor:
        """Return a request's code slots: the first slots of its draft KV."""
        parts = state.split
        first = parts.budget.offered if parts.residency is Residency.DEVICE else 0
        row = self._handles.row(state)
        return row[first : first + parts.budget.code_slots].to(torch.int64).clone()

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pool's keys and values of a layer."""
        pool = self._handles.pool
        return pool.k_buffer[layer], pool.v_buffer[layer]

    def _new_layout(self, coded: int) -> CodeLayout:
        geometry, dtype = self._handles.geometry, self._handles.host.dtype
        return CodeLayout(self.codec, geometry, dtype, coded)


class SlotDrafts:
    """See ``DraftReader``; reads the slots a request had at its construction.

    Args:
        codes: Codes of the server.
        parts: Parts of the request.
        slots: [code slots] int64.
    """

    def __init__(self, codes: Codes, parts: Parts, slots: torch.Tensor) -> None:
        self._codes, self._parts, self._slots = codes, parts, slots
        self._layout = codes.layout(parts.budget.coded)

    def __call__(self, layer: int) -> list[PartSpec]:
        """See ``DraftReader``."""
        return [
            self._codes.part(layer, self._parts, self._slots, i)
            for i in range(len(self._layout.segments))
        ]

    def planes(self, layer: int) -> DraftPlanes:
        """See ``DraftReader.planes``."""
        images = self._layout.images(self._codes.buffers(layer), self._slots)
        return DraftPlanes(*images, *self._where)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """See ``DraftReader.record_stream``."""
        self._slots.record_stream(stream)

    @cached_property
    def _where(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the field offsets and the token count of every segment.

        Computed on the device: an upload from the host would synchronise.
        """
        segments, device = self._layout.segments, self._slots.device
        first, last = segments[0], segments[-1]
        number = torch.arange(len(segments), device=device)
        ends = self._layout.offsets(last)
        columns = []
        for name, offset in self._layout.offsets(first).items():
            width = self._layout.widths[name.startswith("value")]
            column = number * (first.slots * width) + offset
            column[-1:].add_(ends[name] - offset)
            columns.append(column)
        tokens = torch.full_like(number, first.tokens, dtype=torch.int32)
        tokens[-1:].fill_(last.tokens)
        return torch.stack(columns, dim=1), tokens
