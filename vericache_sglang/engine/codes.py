"""Packed draft parts of running requests: written once, read by every draft."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.budget import code_from
from vericache_sglang.compression.codecs.base import Extent
from vericache_sglang.engine.state import Layout
from vericache_sglang.errors import CompressionError
from vericache_sglang.memory.code_slots import CodeLayout
from vericache_sglang.memory.segments import SEGMENT, segment_bounds
from vericache_sglang.memory.splitting import pick

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_kernels.packed_attention import Segment
    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.compression.codecs.base import Codec, Part
    from vericache_sglang.engine.places import Places
    from vericache_sglang.engine.state import Parts, RequestState
    from vericache_sglang.memory.complement import DraftParts

REPEATS = 3


class Codes:
    """Packs, finds and decodes the codes of split requests.

    Args:
        codec: Bound to the model.
        places: Pool and row table.

    Raises:
        CompressionError: Its blocks do not divide a segment.
    """

    def __init__(self, codec: Codec, places: Places) -> None:
        self.codec = codec
        self._places = places
        self.block = math.lcm(places.geometry.page_size, codec.needs.token_align)
        if SEGMENT % self.block:
            raise CompressionError(
                f"--vericache-compressor: {codec.name} packs {self.block} tokens "
                f"together, which does not divide a segment of {SEGMENT}"
            )
        self._layout = cache(self._new_layout)

    @property
    def transfer_fraction(self) -> float:
        """Bytes a verification brings back over those of the packed tokens' KV."""
        geometry = self._places.geometry
        extent = Extent(
            heads=geometry.kv_heads,
            tokens=SEGMENT,
            key_dim=geometry.head_dim,
            value_dim=geometry.v_head_dim,
            dtype=self._places.host.dtype,
        )
        return self.codec.transfer_fraction(extent)

    def complete(self, budget: Budget) -> Budget:
        """Return a budget with as many tokens packed as fill whole blocks."""
        packed = code_from(budget, self.block)
        slots = self._layout(packed.coded).slots
        return replace(packed, code_slots=slots)

    def encode(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        coded: torch.Tensor,
    ) -> list[Part]:
        """Pack one layer's tokens.

        Args:
            layer: Layer index.
            keys: [B, H, D] of the prompt, in order.
            values: [B, H, Dv].
            coded: [H, coded] int64, which tokens.

        Returns:
            Draft parts, segment by segment.
        """
        packed = [pick(entries, coded) for entries in (keys, values)]
        return [
            self.codec.encode(
                packed[0][start:stop].transpose(0, 1),
                packed[1][start:stop].transpose(0, 1),
                layer=layer,
                positions=coded[:, start:stop],
                sinks=torch.empty(0, dtype=torch.int64),
            )[0]
            for start, stop in segment_bounds(coded.shape[1])
        ]

    def put(self, layer: int, slots: torch.Tensor, parts: list[Part]) -> None:
        """Write one layer's draft parts.

        Args:
            layer: Layer index.
            slots: [code slots] int64.
            parts: As ``encode`` returned them.
        """
        layout = self._layout(sum(part.extent.tokens for part in parts))
        for segment, part in zip(layout.segments, parts, strict=True):
            layout.write(segment, self._buffers(layer), slots, part)

    def drafts(self, state: RequestState) -> DraftParts:
        """Return a reader of a request's draft parts, where they are now."""
        parts, slots = state.split, self._slots(state)

        def read(layer: int) -> list[Part]:
            return [
                self._part(layer, parts, slots, i)
                for i in range(len(self._layout(parts.budget.coded).segments))
            ]

        return read

    def segments(self, state: RequestState) -> Callable[[int], list[Segment]]:
        """Return, by layer, what decodes each segment of a request's draft part."""
        parts, slots = state.split, self._slots(state)
        count = len(self._layout(parts.budget.coded).segments)

        def decoded(layer: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.codec.decode(self._part(layer, parts, slots, i))

        return lambda layer: [partial(decoded, layer, i) for i in range(count)]

    def seconds_per_token(self) -> float:
        """Time decoding one segment of one layer; per packed token, in seconds."""
        geometry = self._places.geometry
        shape = (SEGMENT, geometry.kv_heads, geometry.head_dim)
        keys = torch.zeros(shape, dtype=self._places.host.dtype)
        where = torch.arange(SEGMENT).expand(geometry.kv_heads, SEGMENT)
        part = self.encode(0, keys, keys, where)[0]
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            self.codec.decode(part)
            times.append(time.perf_counter() - began)
        return min(times) / part.extent.tokens

    def _part(self, layer: int, parts: Parts, slots: torch.Tensor, i: int) -> Part:
        layout = self._layout(parts.budget.coded)
        span = layout.segments[i]
        positions = parts.coded[layer, :, span.start : span.start + span.tokens]
        return layout.read(span, self._buffers(layer), slots, layer, positions)

    def _slots(self, state: RequestState) -> torch.Tensor:
        """Return a request's code slots: the first ones of its draft part."""
        parts = state.split
        first = parts.budget.offered if parts.layout is Layout.BESIDE else 0
        row = self._places.row(state)
        return row[first : first + parts.budget.code_slots].to(torch.int64).clone()

    def _buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self._places.pool
        return pool.k_buffer[layer], pool.v_buffer[layer]

    def _new_layout(self, coded: int) -> CodeLayout:
        geometry, dtype = self._places.geometry, self._places.host.dtype
        return CodeLayout(self.codec, geometry, dtype, coded)
