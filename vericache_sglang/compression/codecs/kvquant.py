"""KVQuant: pre-RoPE keys, non-uniform codes, exact outliers (arXiv:2401.18079)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from vericache_sglang.compression.about import About
from vericache_sglang.compression.codecs.base import (
    CODECS,
    Codec,
    CodecNeeds,
    Layout,
    PartShape,
    PartSpec,
    Rotation,
    Source,
    Tensors,
)
from vericache_sglang.compression.codecs.kvquant_tables import KVQuantTables
from vericache_sglang.compression.codecs.nuq import (
    NuqRows,
    Scale,
    decode_rows,
    encode_rows,
    inner_range,
)
from vericache_sglang.compression.codecs.packing import pack, packed_bytes, unpack
from vericache_sglang.compression.codecs.rows import (
    as_heads,
    as_rows,
    before_rope,
    behind_rope,
)
from vericache_sglang.compression.codecs.sinks import (
    blend,
    other_slots,
    sink_fields,
    sink_layout,
)
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from vericache_sglang.compression.base import ModelSpec


@CODECS.register("kvquant")
@dataclass(frozen=True, eq=False)
class KVQuant(Codec):
    """Calibrated code books; keys are scaled per channel, values per token.

    A row is one slot of all KV heads, C = H * D numbers; keys are un-rotated to their
    pre-RoPE values. With several ranks a row is one slot of a rank's heads: each rank
    has its own value range and its own outliers. A number is mapped to about [-1, 1]
    and becomes the index of the nearest entry of its layer's code book. Key channels
    are mapped by their calibrated thresholds, values by the range of their own row
    without its outliers (sections 3.1 to 3.4 of the paper).

    Unlike in the official code the number of exact outliers is fixed: a row has
    ``cap * C`` of them, the numbers furthest out. Further outliers are clipped to the
    end of the book; if there are fewer, other numbers are exact. So all rows have the
    same size.

    Attributes:
        tables: Thresholds and books of every layer.
        cap: Exact numbers in a row as a share of C, in [0, 1], rounded up.
        sinks: Tokens at positions below this stay exact unless ``encode`` gets
            ``sinks``.
        rope: The model's rotary embedding, from ``bind``.

    Raises:
        CompressionError: A parameter is out of its bounds.
    """

    name: ClassVar[str] = "kvquant"
    about: ClassVar[About] = About(
        paper="KVQuant, arXiv:2401.18079",
        kind="quantize",
        licence="none at top level (SqueezeAILab/KVQuant); no code shared",
    )

    tables: KVQuantTables = field(metadata={"read": KVQuantTables.read})
    cap: float = 0.0125
    sinks: int = 4
    rope: Rotation | None = field(default=None, metadata={"identity": False})

    def __post_init__(self) -> None:
        if not 0 <= self.cap <= 1:
            raise CompressionError(f"kvquant: cap must be in [0, 1], got {self.cap}")
        if self.sinks < 0:
            raise CompressionError(f"kvquant: sinks must be >= 0, got {self.sinks}")

    @property
    def needs(self) -> CodecNeeds:
        """See ``Codec.needs``."""
        return CodecNeeds(artifact=KVQuantTables.KIND, rope=True)

    def bind(self, rope: Rotation) -> KVQuant:
        """See ``Codec.bind``."""
        return dataclasses.replace(self, rope=rope)

    def of_heads(self, first: int, heads: int, all_heads: int) -> KVQuant:
        """See ``Codec.of_heads``."""
        tables = self.tables.of_heads(first, heads, all_heads)
        return dataclasses.replace(self, tables=tables)

    def check_model(self, spec: ModelSpec) -> None:
        """See ``Codec.check_model``."""
        self.tables.check_model(spec)

    def draft_layout(self, part_shape: PartShape) -> Layout:
        """See ``Codec.draft_layout``; fixed by shape and ``exact_tokens``.

        Raises:
            CompressionError: The tables are for keys of another width.
        """
        columns = part_shape.heads * part_shape.key_dim
        if columns != self.tables.columns:
            raise CompressionError(
                f"{self.tables.source}: field 'key_low' is for {self.tables.columns} "
                f"columns, the keys have {columns}"
            )
        rows = part_shape.tokens - part_shape.exact_tokens
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "value_offset": (part_shape.dtype, (rows, 1)),
            "value_reach": (part_shape.dtype, (rows, 1)),
        }
        for part, dim in (("key", part_shape.key_dim), ("value", part_shape.value_dim)):
            columns = part_shape.heads * dim
            places = (rows, self.places(columns))
            width = packed_bytes(columns, self.tables.bits)
            layout[f"{part}_codes"] = (torch.uint8, (rows, width))
            layout[f"{part}_columns"] = (_column_dtype(columns), places)
            layout[f"{part}_exact"] = (part_shape.dtype, places)
        return {**layout, **sink_layout(part_shape)}

    def places(self, columns: int) -> int:
        """Return how many numbers of a row of ``columns`` stay exact."""
        return math.ceil(self.cap * columns - 1e-9)  # without float dust

    def _encode_draft(self, source: Source) -> tuple[PartShape, Tensors]:
        self.tables.check_layer(source.layer)
        draft = dict(sink_fields(source, self._default_sinks(source)))
        part_shape = dataclasses.replace(
            source.part_shape, exact_tokens=len(draft["sink_slots"])
        )
        self.draft_layout(part_shape)
        others = other_slots(draft["sink_slots"], part_shape.tokens)
        rows = as_rows(before_rope(self.rope, source))[others]
        scale = self.tables.on(rows.device).key_scale(source.layer)
        distance = scale.normalized(rows).abs()
        draft |= self._coded("key", source, rows, scale, distance)
        rows = as_rows(source.values.to(torch.float32))[others]
        exact_scale, _, distance = inner_range(rows, self.tables.outliers)
        draft["value_offset"] = exact_scale.offset.to(part_shape.dtype)
        draft["value_reach"] = exact_scale.reach.to(part_shape.dtype)
        scale = _value_scale(draft)
        draft |= self._coded("value", source, rows, scale, distance)
        return part_shape, draft

    def _coded(
        self,
        part: str,
        source: Source,
        rows: torch.Tensor,
        scale: Scale,
        distance: torch.Tensor,
    ) -> Tensors:
        """Return the fields of key or value rows [N, C]."""
        columns = rows.shape[1]
        book = self._book(part, source.layer, rows.device)
        coded = encode_rows(rows, scale, book, distance, self.places(columns))
        return {
            f"{part}_codes": pack(coded.codes, self.tables.bits),
            f"{part}_columns": coded.columns.to(_column_dtype(columns)),
            f"{part}_exact": coded.exact.to(source.part_shape.dtype),
        }

    def _decode(self, draft: PartSpec) -> tuple[torch.Tensor, torch.Tensor]:
        tensors, heads = draft.tensors, draft.part_shape.heads
        self.tables.check_layer(draft.layer)
        device = tensors["key_codes"].device
        scale = self.tables.on(device).key_scale(draft.layer)
        keys = as_heads(self._rows("key", draft, scale), heads)
        keys = behind_rope(self.rope, keys, draft)
        scale = _value_scale(tensors)
        values = as_heads(self._rows("value", draft, scale), heads)
        dtype, sinks = draft.part_shape.dtype, tensors["sink_slots"]
        return (
            blend(keys.to(dtype), tensors["sink_keys"], sinks),
            blend(values.to(dtype), tensors["sink_values"], sinks),
        )

    def _rows(self, part: str, draft: PartSpec, scale: Scale) -> torch.Tensor:
        """Decode the rows [N, C] that ``_coded`` wrote, float32."""
        tensors, part_shape = draft.tensors, draft.part_shape
        dim = part_shape.key_dim if part == "key" else part_shape.value_dim
        packed = tensors[f"{part}_codes"]
        coded = NuqRows(
            unpack(packed, self.tables.bits, part_shape.heads * dim),
            tensors[f"{part}_columns"].to(torch.int64) & 0xFFFF,
            tensors[f"{part}_exact"].to(torch.float32),
        )
        return decode_rows(coded, scale, self._book(part, draft.layer, packed.device))

    def _book(self, part: str, layer: int, device: torch.device) -> torch.Tensor:
        tables = self.tables.on(device)
        books = tables.key_books if part == "key" else tables.value_books
        return books[layer]

    def _default_sinks(self, source: Source) -> torch.Tensor:
        """Return the slots that hold a sink position in every head."""
        if source.sinks is not None:
            return source.sinks
        if source.positions is None:
            raise CompressionError("kvquant: positions of the keys are needed")
        positions = source.positions.expand(
            source.part_shape.heads, source.part_shape.tokens
        )
        return (positions < self.sinks).all(0).nonzero()[:, 0]


def _column_dtype(columns: int) -> torch.dtype:
    """Return the integer dtype of column indices: one or two unsigned bytes.

    Raises:
        CompressionError: There are too many columns for two bytes.
    """
    if columns > 1 << 16:
        raise CompressionError(f"kvquant: rows of {columns} numbers exceed 65536")
    return torch.uint8 if columns <= 1 << 8 else torch.int16


def _value_scale(fields: Tensors) -> Scale:
    """Return the stored scale of value rows."""
    return Scale(
        fields["value_offset"].to(torch.float32),
        fields["value_reach"].to(torch.float32),
    )
