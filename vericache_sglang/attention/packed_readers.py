"""What packed attention reads of coded rows: images of codes, or what torch decodes."""

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
    """What packed attention reads of the coded rows of a forward, layer by layer."""

    @property
    def step(self) -> DecodeStep:
        """How fields become keys and values."""

    def rows(
        self, layer: int, kv: KV, first: torch.Tensor
    ) -> Iterator[tuple[slice, PackedRows]]:
        """Yield rows of the forward and their codes; rows without any may be left out.

        Args:
            layer: Layer index.
            kv: Of the layer.
            first: [R + 1] int32, first segment of every row.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Codes a kernel decodes, of all rows at once.

    They lie in the same slots of every layer, but anywhere in the pool, so each layer's
    are gathered first. All tensors are on the device.

    Attributes:
        codec: Its step and tables.
        offsets: [S, F] int64, bytes to each field in what is gathered, K or V.
        tokens: [S] int32, coded tokens of a segment.
        slots: [C] int64, slots of the codes, segment after segment.
        positions: Of each coded row [L, H, coded] int32, or [L, 1, coded] where heads
            have the same tokens; empty where the step asks for none.
        places: [S, H] int64, where a segment's positions begin in those of all rows,
            one behind the other head by head; None as above.
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
    """Codes no kernel decodes: torch does, row by row, layer by layer.

    Attributes:
        decode: Row -> what decodes its segments, by layer.
        offsets: [S, 2] int64, bytes to a segment's keys and values among its row's.
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
