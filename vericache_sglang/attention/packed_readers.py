"""Inputs of packed attention: codes decoded by a kernel, or KV decoded by torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch

from vericache_kernels.packed_attention import DecodedStep, PackedRows
from vericache_sglang.kv.split_layers import as_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vericache_kernels.packed_attention import DecodeStep, Segment
    from vericache_sglang.attention.codec_steps import CodecStep

    KV = tuple[torch.Tensor, torch.Tensor]
    """K and V [slots, H, D] of a layer, contiguous."""


class CodeReader(Protocol):
    """Provides the coded rows of a forward to packed attention, layer by layer."""

    @property
    def step(self) -> DecodeStep:
        """The decode step that turns fields into keys and values."""

    def rows(
        self, layer: int, kv: KV, first: torch.Tensor
    ) -> Iterator[tuple[slice, PackedRows]]:
        """Yield ranges of rows with their codes; rows without codes may be omitted.

        Args:
            layer: Layer index.
            kv: K and V buffers of the layer.
            first: [R + 1] int32, first segment of every row.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Codes of all rows, decoded by a kernel.

    The codes occupy the same slots in every layer, scattered over the pool, so they are
    gathered per layer. All tensors are on the device.

    Attributes:
        codec: Decode step and tables.
        offsets: [S, F] int64, byte offset of each field in the gathered K or V.
        tokens: [S] int32, coded tokens of a segment.
        slots: [C] int64, slots of the codes, segment after segment.
        positions: Per coded row [L, H, coded] int32, or [L, 1, coded] if all heads keep
            the same tokens; empty if the step does not need positions.
        places: [S, H] int64, start of each segment and head in the positions of all
            rows, concatenated head by head; None if the step needs no positions.
    """

    codec: CodecStep
    offsets: torch.Tensor
    tokens: torch.Tensor
    slots: torch.Tensor
    positions: Sequence[torch.Tensor] = ()
    places: torch.Tensor | None = None

    @property
    def step(self) -> DecodeStep:
        """See ``CodeReader.step``."""
        return self.codec.step

    def rows(
        self, layer: int, kv: KV, first: torch.Tensor
    ) -> Iterator[tuple[slice, PackedRows]]:
        """See ``CodeReader.rows``."""
        codec, positions = self.codec, None
        if self.positions:
            positions = torch.cat([each[layer] for each in self.positions], dim=1)
        gathered = (as_bits(buffer)[self.slots] for buffer in kv)
        keys, values = (codes.view(torch.uint8).view(-1) for codes in gathered)
        yield (
            slice(0, len(first) - 1),
            PackedRows(
                *(keys, values, self.offsets, self.tokens, first),
                positions=positions,
                places=self.places,
                tables=None if codec.tables is None else codec.tables[layer],
                order=None if codec.order is None else codec.order[layer],
                rope=codec.rope,
            ),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRows:
    """Codes without a kernel, decoded by torch row by row and layer by layer.

    Attributes:
        decode: Row -> layer -> decoders of its segments.
        offsets: [S, 2] int64, byte offsets of a segment's keys and values in its row.
        tokens: [S] int32, coded tokens of a segment.
    """

    decode: dict[int, Callable[[int], list[Segment]]]
    offsets: torch.Tensor
    tokens: torch.Tensor

    @property
    def step(self) -> DecodeStep:
        """See ``CodeReader.step``."""
        return DecodedStep()

    def rows(
        self, layer: int, kv: KV, first: torch.Tensor
    ) -> Iterator[tuple[slice, PackedRows]]:
        """See ``CodeReader.rows``; one row is decoded at a time."""
        for row, segments in self.decode.items():
            pairs = chain.from_iterable(decode() for decode in segments(layer))
            image = torch.cat([entries.reshape(-1) for entries in pairs])
            image = image.view(torch.uint8)
            own = first[row : row + 2]
            yield (
                slice(row, row + 1),
                PackedRows(image, image, self.offsets, self.tokens, own),
            )
