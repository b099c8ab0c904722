"""RotateKV: rotated, reordered, then quantized per token (arXiv:2501.16383)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

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
from vericache_sglang.compression.codecs.packing import pack, packed_bytes, unpack
from vericache_sglang.compression.codecs.rotatekv_tables import (
    RotateKVTables,
    rotate_heads,
)
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

ZERO_LIMIT = (1 << 15) - 1
"""Largest zero point that is stored, in steps."""


class Affine(NamedTuple):
    """Numbers as ``step * (code - zero)``, in groups of g.

    Attributes:
        codes: [..., n, g] uint8.
        step: [..., n], > 0 for finite numbers.
        zero: [..., n] int16.
    """

    codes: torch.Tensor
    step: torch.Tensor
    zero: torch.Tensor


def quantize(
    groups: torch.Tensor, bits: int, clip: float, levels: int, dtype: torch.dtype
) -> Affine:
    """Quantize with a step and an integer zero point per group.

    Both ends of the range are multiplied by ``clip`` first, which also moves a range
    that does not hold 0; a constant group is exact where ``clip`` is 1.

    Args:
        groups: [..., n, g] float32.
        bits: Width of a code, 1 to 8.
        clip: Part of the range that is represented, in (0, 1].
        levels: Steps in the range; ``2**bits - 1`` is all the codes can tell apart.
        dtype: Of the stored step.
    """
    high, low = groups.amax(-1) * clip, groups.amin(-1) * clip
    spread = (high - low) / levels
    # All numbers (nearly) equal: one step away from zero, or zero itself.
    flat = low.abs().where(low != 0, 1.0)
    step = spread.where(spread * ZERO_LIMIT > low.abs(), flat).to(dtype)
    wide = step.to(torch.float32)
    zero = (-low / wide).round().clamp(-ZERO_LIMIT, ZERO_LIMIT)
    numbers = (groups / wide[..., None]).round() + zero[..., None]
    codes = numbers.clamp(0, (1 << bits) - 1).nan_to_num(0)
    return Affine(codes.to(torch.uint8), step, zero.nan_to_num(0).to(torch.int16))


def dequantize(affine: Affine) -> torch.Tensor:
    """Return the numbers of ``quantize``, [..., n, g] float32."""
    steps = affine.codes.to(torch.float32) - affine.zero[..., None]
    return steps * affine.step[..., None].to(torch.float32)


@CODECS.register("rotatekv")
@dataclass(frozen=True, eq=False)
class RotateKV(Codec):
    """Rotation spreads outliers, so that 2 bits per number suffice.

    A row is one slot of all KV heads of a rank. RoPE is undone on keys, groups of heads
    are rotated together (Walsh-Hadamard), channels are put in the calibrated order, and
    ``group`` neighbours share step and zero point (sections 4.1 and 4.2 of the paper;
    the official code rotates first, then reorders). Values are rotated head by head.
    Sinks are exact: the paper finds them by the layer's input (``massive_slots``).

    Attributes:
        tables: Order of the rotated channels of every layer.
        bits: Width of a code, 2 to 8; the paper has 2, 3 and 4.
        group: Channels that share step and zero point.
        clip: Share of a group's range that is represented, in (0, 1]; the official
            presets have 0.8 for 2 bits, 1.0 for 3 and 4.
        published_levels: Divide the range by ``bits**2 - 1`` as the official code does,
            not by ``2**bits - 1``; they differ for 3 bits (8 and 7).
        rope: The model's rotation, from ``bind``.

    Raises:
        CompressionError: A parameter is out of its bounds.
    """

    name: ClassVar[str] = "rotatekv"
    about: ClassVar[About] = About(
        paper="RotateKV, arXiv:2501.16383",
        kind="quantize",
        licence="no licence file; no code shared",
    )

    tables: RotateKVTables = field(metadata={"read": RotateKVTables.read})
    bits: int = 2
    group: int = 128
    clip: float = 0.8
    published_levels: bool = False
    rope: Rotation | None = field(default=None, metadata={"identity": False})

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise CompressionError(f"rotatekv: bits must be 2 to 8, got {self.bits}")
        if self.group < 1:
            raise CompressionError(f"rotatekv: group must be >= 1, got {self.group}")
        if not 0 < self.clip <= 1:
            raise CompressionError(f"rotatekv: clip must be in (0, 1], got {self.clip}")

    @property
    def needs(self) -> CodecNeeds:
        """See ``Codec.needs``."""
        return CodecNeeds(artifact=RotateKVTables.KIND, rope=True, resid_in=True)

    def bind(self, rope: Rotation) -> RotateKV:
        """See ``Codec.bind``."""
        return dataclasses.replace(self, rope=rope)

    def of_heads(self, first: int, heads: int, all_heads: int) -> RotateKV:
        """See ``Codec.of_heads``."""
        tables = self.tables.of_heads(first, heads, all_heads)
        return dataclasses.replace(self, tables=tables)

    def check_model(self, spec: ModelSpec) -> None:
        """See ``Codec.check_model``."""
        self.tables.check_model(spec)

    def draft_layout(self, part_shape: PartShape) -> Layout:
        """See ``Codec.draft_layout``; fixed by shape and ``exact_tokens``.

        Raises:
            CompressionError: Groups do not divide a row.
        """
        rows = part_shape.tokens - part_shape.exact_tokens
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for part, dim in (("key", part_shape.key_dim), ("value", part_shape.value_dim)):
            columns = part_shape.heads * dim
            if columns % self.group:
                raise CompressionError(
                    f"rotatekv: group {self.group} does not divide the {columns} "
                    f"columns of the {part}s"
                )
            groups = (rows, columns // self.group)
            width = packed_bytes(columns, self.bits)
            layout[f"{part}_codes"] = (torch.uint8, (rows, width))
            layout[f"{part}_step"] = (part_shape.dtype, groups)
            layout[f"{part}_zero"] = (torch.int16, groups)
        return {**layout, **sink_layout(part_shape)}

    def _encode_draft(self, source: Source) -> tuple[PartShape, Tensors]:
        none = torch.empty(0, dtype=torch.int32)
        sinks = none if source.sinks is None else source.sinks
        draft = dict(sink_fields(source, sinks))
        slots = draft["sink_slots"]
        part_shape = dataclasses.replace(source.part_shape, exact_tokens=len(slots))
        self.draft_layout(part_shape)
        order = self._order(source.layer, part_shape, slots.device)
        others = other_slots(slots, part_shape.tokens)
        rows = as_rows(before_rope(self.rope, source))[others]
        rows = rotate_heads(rows, part_shape.key_dim, self.tables.rotated_heads)
        draft |= self._coded("key", rows[:, order], part_shape)
        rows = as_rows(source.values.to(torch.float32))[others]
        draft |= self._coded(
            "value", rotate_heads(rows, part_shape.value_dim, 1), part_shape
        )
        return part_shape, draft

    def _coded(self, part: str, rows: torch.Tensor, part_shape: PartShape) -> Tensors:
        """Return the fields of key or value rows [N, C]."""
        levels = (1 << self.bits) - 1
        if self.published_levels:
            levels = self.bits**2 - 1
        groups = rows.view(len(rows), -1, self.group)
        affine = quantize(groups, self.bits, self.clip, levels, part_shape.dtype)
        return {
            f"{part}_codes": pack(affine.codes.flatten(1), self.bits),
            f"{part}_step": affine.step,
            f"{part}_zero": affine.zero,
        }

    def _decode(self, draft: PartSpec) -> tuple[torch.Tensor, torch.Tensor]:
        part_shape, tensors = draft.part_shape, draft.tensors
        sinks = tensors["sink_slots"]
        order = self._order(draft.layer, part_shape, sinks.device)
        rows = self._rows("key", draft, part_shape.heads * part_shape.key_dim)
        rows = torch.empty_like(rows).index_copy_(1, order, rows)
        rows = rotate_heads(rows, part_shape.key_dim, self.tables.rotated_heads)
        keys = behind_rope(self.rope, as_heads(rows, part_shape.heads), draft)
        rows = self._rows("value", draft, part_shape.heads * part_shape.value_dim)
        values = as_heads(rotate_heads(rows, part_shape.value_dim, 1), part_shape.heads)
        return (
            blend(keys.to(part_shape.dtype), tensors["sink_keys"], sinks),
            blend(values.to(part_shape.dtype), tensors["sink_values"], sinks),
        )

    def _rows(self, part: str, draft: PartSpec, columns: int) -> torch.Tensor:
        """Decode the rows [N, C] that ``_coded`` wrote, float32."""
        codes = unpack(draft.tensors[f"{part}_codes"], self.bits, columns)
        affine = Affine(
            codes.view(len(codes), columns // self.group, self.group),
            draft.tensors[f"{part}_step"],
            draft.tensors[f"{part}_zero"],
        )
        return dequantize(affine).flatten(1)

    def _order(
        self, layer: int, part_shape: PartShape, device: torch.device
    ) -> torch.Tensor:
        """Return the order [C] of a layer's rotated key channels."""
        self.tables.check(layer, part_shape.heads * part_shape.key_dim)
        return self.tables.on(device).order[layer]


def massive_slots(hidden: torch.Tensor, entries: int = 20) -> torch.Tensor:
    """Find attention sinks by the massive activations of a layer's input.

    Args:
        hidden: [T, d], input of the layer: the residual stream.
        entries: Number of largest absolute values considered; several may belong to
            one token.

    Returns:
        [n] int64, n <= ``entries``, slots ascending and unique.
    """
    sizes = hidden.abs().flatten()
    top = sizes.topk(min(entries, len(sizes))).indices
    slots: torch.Tensor = (top // hidden.shape[1]).unique()
    return slots
