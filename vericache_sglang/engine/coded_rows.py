"""Draft rows that begin with codes, as the GPU's packed attention reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from vericache_kernels.packed_attention import (
    ExactRows,
    KIVIStep,
    PackedRows,
    SplitPlanesStep,
    packed_attention,
)
from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.engine.upload import upload
from vericache_sglang.errors import CompressionError
from vericache_sglang.memory.code_slots import ALIGN, CodeLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_kernels.packed_attention import DecodeStep
    from vericache_kernels.ragged_attention import RaggedRows
    from vericache_sglang.compression.codecs.base import Codec
    from vericache_sglang.engine.places import Places
    from vericache_sglang.engine.rows import ForwardRow
    from vericache_sglang.memory.code_slots import Segment


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """Which of R rows begin with codes and where these lie; on ``spec_info.coded``.

    A coded row has one query token. Its codes lie in the same slots of every layer, but
    anywhere in the pool, so each layer's are gathered first: the *image* of C slots has
    2 * C rows of a slot's K or V, every segment's K rows and then its V rows. All
    tensors are on the device.

    Attributes:
        step: How the codec's fields become keys and values.
        begin: [R] int32, slots of codes a row begins with; 0: it has none.
        first: [R + 1] int32; row r has the segments ``first[r]`` to ``first[r + 1]``.
        offsets: [S, F] int64, bytes from the start of the image to each field.
        tokens: [S] int32, coded tokens of a segment.
        slots: [C] int64, slots of the codes.
        key_at: [C] int64, row of the image where a slot's K goes.
        value_at: [C] int64, likewise its V.
        exact: At least as many as the coded rows have entries behind their codes, all
            rows together.
    """

    step: DecodeStep
    begin: torch.Tensor
    first: torch.Tensor
    offsets: torch.Tensor
    tokens: torch.Tensor
    slots: torch.Tensor
    key_at: torch.Tensor
    value_at: torch.Tensor
    exact: int


@dataclass(frozen=True, slots=True, eq=False)
class CodedForward:
    """The coded rows of one forward, in the kernel's terms; the same for every layer.

    Attributes:
        codes: What is coded.
        segments: [R + 1] int32, first segment of every row.
        slots: [exact] int32, exact slots of the coded rows, row after row.
        first_slot: [R + 1] int32, where each row's begin among them.
        query: [R] int64, first token of every row.
        row_of: [T] int64, row of every token.
        coded: [T] bool, whether that row is coded.
    """

    codes: CodedRows
    segments: torch.Tensor
    slots: torch.Tensor
    first_slot: torch.Tensor
    query: torch.Tensor
    row_of: torch.Tensor
    coded: torch.Tensor

    def attend(
        self,
        queries: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        scaling: float,
        others: torch.Tensor,
    ) -> torch.Tensor:
        """Attend the coded rows; the tokens of other rows keep what they have.

        Args:
            queries: [T, Hq, D].
            kv: K and V [slots, H, D] of the layer, contiguous.
            scaling: Factor on the scores.
            others: [T, Hq, D], of the rows without codes.
        """
        image = self._image(kv)
        packed = PackedRows(
            image, image, self.codes.offsets, self.codes.tokens, self.segments
        )
        exact = ExactRows(*kv, self.slots, self.first_slot)
        asked = queries[self.query].unsqueeze(1)
        found = packed_attention(asked, packed, exact, self.codes.step, scaling)
        return torch.where(self.coded[:, None, None], found[self.row_of, 0], others)

    def _image(self, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Gather one layer's codes, byte by byte: [*] uint8."""
        codes = self.codes
        keys, values = (buffer.view(torch.uint8).view(len(buffer), -1) for buffer in kv)
        image = keys.new_empty(2 * len(codes.slots), keys.shape[1])
        image[codes.key_at] = keys[codes.slots]
        image[codes.value_at] = values[codes.slots]
        return image.view(-1)


class DraftCodes:
    """Lists the codes of a forward's draft rows; nothing waits for the device.

    Args:
        codec: The server's, without an exact tail (``Codes.codec``).
        places: Pool and row table.

    Raises:
        CompressionError: No kernel reads the codec, or not in the model's shapes.
    """

    def __init__(self, codec: Codec, places: Places) -> None:
        self._codec, self._places = codec, places
        geometry = places.geometry
        self._step = step_of(codec)
        try:
            self._step.check(geometry.kv_heads, geometry.head_dim)
        except ValueError as error:
            raise CompressionError(str(error)) from error
        if geometry.head_dim != geometry.v_head_dim:
            raise CompressionError(
                f"{codec.name}: the kernel needs K and V of one width, got "
                f"{geometry.head_dim} and {geometry.v_head_dim}"
            )
        self._slot_bytes = (
            geometry.kv_heads * geometry.head_dim * geometry.element_bytes
        )
        self._layout = cache(self._new_layout)

    def of(self, rows: Sequence[ForwardRow]) -> CodedRows | None:
        """Return the codes that rows begin with, for ``spec_info.coded``.

        Args:
            rows: Of a mixed forward; those with ``packed`` are drafts whose table row
                lists the code slots first.

        Returns:
            None where no row has codes.
        """
        begins, counts, slots, exact = [], [], [], 0
        offsets: list[int] = []
        tokens: list[int] = []
        key_at: list[int] = []
        value_at: list[int] = []
        for row in rows:
            budget = row.packed.split.budget if row.packed is not None else None
            begins.append(0 if budget is None else budget.code_slots)
            if budget is None:
                counts.append(0)
                continue
            layout, fields = self._layout(budget.coded)
            counts.append(len(layout.segments))
            used = 0
            for segment, places in zip(layout.segments, fields, strict=True):
                at = len(key_at) + len(value_at)
                offsets += [at * self._slot_bytes + place for place in places]
                tokens.append(segment.tokens)
                key_at += range(at, at + segment.slots)
                value_at += range(at + segment.slots, at + 2 * segment.slots)
                used += segment.slots
            slots.append(self._places.table[row.table_row, :used])
            length = row.prefix + row.loose + len(row.columns)
            exact += length - budget.code_slots
        if not slots:
            return None
        first = list(accumulate(counts, initial=0))
        device = self._places.table.device
        sent = upload(device, begins, first, offsets, tokens, key_at, value_at)
        return CodedRows(
            step=self._step,
            begin=sent[0].to(torch.int32),
            first=sent[1].to(torch.int32),
            offsets=sent[2].view(-1, len(self._step.fields)),
            tokens=sent[3].to(torch.int32),
            slots=torch.cat(slots).to(torch.int64),
            key_at=sent[4],
            value_at=sent[5],
            exact=exact,
        )

    def _new_layout(self, coded: int) -> tuple[CodeLayout, list[list[int]]]:
        """Return where ``coded`` tokens lie, and each segment's fields in its image."""
        places = self._places
        layout = CodeLayout(self._codec, places.geometry, places.host.dtype, coded)
        return layout, [self._fields(segment) for segment in layout.segments]

    def _fields(self, segment: Segment) -> list[int]:
        """Return the byte offsets of a segment's fields, in the step's order."""
        found, offset = {}, 0
        for name, (dtype, shape) in self._codec.draft_layout(segment.extent).items():
            found[name] = offset
            size = dtype.itemsize * math.prod(shape)
            offset += -(-size // ALIGN) * ALIGN
        return [found[name] for name in self._step.fields]


def step_of(codec: Codec) -> DecodeStep:
    """Return how a kernel decodes a codec's draft parts.

    Raises:
        CompressionError: None does: there is no kernel, or it needs tables of every
            request, which nobody builds.
    """
    if isinstance(codec, KIVI):
        return KIVIStep(codec.bits, codec.group)
    if isinstance(codec, SplitPlanes):
        return SplitPlanesStep(codec.exponent_bits, codec.mantissa_bits, codec.block)
    raise CompressionError(f"no attention on a GPU reads the codes of {codec.name}")


def coded_forward(
    coded: CodedRows, rows: RaggedRows, tokens: int
) -> tuple[CodedForward, RaggedRows]:
    """Part the coded rows of a forward from the others; waits for nothing.

    Args:
        coded: Of the first rows; those behind it are not coded.
        rows: All rows of the forward, from their first entry on.
        tokens: T, query tokens, those of no row included.

    Returns:
        The coded rows, and all rows with nothing to see in coded ones.
    """
    count, device = len(rows.row), rows.row.device
    begin = torch.zeros(count, dtype=torch.int64, device=device)
    begin[: len(coded.begin)] = coded.begin
    segments = coded.first[-1:].expand(count + 1).clone()
    segments[: len(coded.first)] = coded.first
    is_coded = begin > 0
    exact = torch.where(is_coded, rows.end - begin, 0)
    first = torch.nn.functional.pad(exact.cumsum(0), (1, 0))
    place = torch.arange(coded.exact, device=device)
    owner = torch.searchsorted(first[1:], place, right=True).clamp(max=count - 1)
    entry = begin[owner] + place - first[owner]
    entry = entry.clamp(max=rows.table.shape[1] - 1)
    token = torch.arange(tokens, device=device)
    bounds = rows.first.to(torch.int64)
    row_of = torch.searchsorted(bounds[1:], token, right=True).clamp(max=count - 1)
    forward = CodedForward(
        codes=coded,
        segments=segments.to(torch.int32),
        slots=rows.table[rows.row[owner].to(torch.int64), entry],
        first_slot=first.to(torch.int32),
        query=bounds[:-1].clamp(max=tokens - 1),
        row_of=row_of,
        coded=is_coded[row_of] & (token < bounds[-1]),
    )
    end = torch.where(is_coded, rows.begin, rows.end)
    return forward, replace(rows, end=end)
