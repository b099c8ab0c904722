"""Timings of the attention kernels: rows of slots, rows of packed codes."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu.floor_shapes import Case, Shape, Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPE = torch.bfloat16
ALIGN = 16
"""Fields of a draft part begin at multiples of so many bytes."""


def cases() -> list[Case]:
    """Return the attention kernels."""
    codecs = {
        "split planes E3M1": partial(split_planes, 3, 1),
        "KIVI 2 bits": partial(kivi, 2),
        "KIVI 4 bits": partial(kivi, 4),
        "KVQuant 4 bits": kvquant,
        "RotateKV 4 bits": rotatekv,
    }
    return [
        Case("ragged attention, drafts", partial(ragged, verifies=0)),
        Case("ragged attention, 2 verifications", partial(ragged, drafts=0), False),
        Case("ragged attention, drafts and 2 verifications", ragged, False),
        *(
            Case(f"packed attention, {name}", partial(packed, codec=codec))
            for name, codec in codecs.items()
        ),
    ]


def ragged(
    shape: Shape, device: str, *, drafts: int | None = None, verifies: int = 2
) -> Timing:
    """Attend drafting rows of kept slots and verifying rows of all slots.

    Args:
        shape: Of the model.
        device: Where.
        drafts: Rows of one query; None: the shape's.
        verifies: Rows of ``shape.drafts`` + 1 queries.
    """
    from vericache_kernels.ragged_attention import RaggedRows, ragged_attention

    ends = [shape.kept] * (shape.rows if drafts is None else drafts)
    queries = [1] * len(ends) + [shape.drafts + 1] * verifies
    ends += [shape.tokens] * verifies
    kv = tuple(
        torch.randn(
            sum(ends), shape.heads, shape.dim, dtype=torch.float32, device=device
        ).to(DTYPE)
        for _ in range(2)
    )
    # Slots in no order: the worst a pool without pages can come to.
    slots = torch.randperm(sum(ends), device=device).to(torch.int32)
    table = torch.zeros(len(ends), max(ends), dtype=torch.int32, device=device)
    at = 0
    for row, end in enumerate(ends):
        table[row, :end] = slots[at : at + end]
        at += end
    rows = RaggedRows(
        table,
        torch.arange(len(ends), dtype=torch.int32, device=device),
        _sums(queries, device),
        torch.zeros(len(ends), dtype=torch.int32, device=device),
        torch.tensor(ends, dtype=torch.int32, device=device),
    )
    q = _queries(shape, sum(queries), device)
    call = partial(
        ragged_attention,
        q,
        kv,
        rows,
        shape.dim**-0.5,
        most_queries=max(queries),
    )
    entry = 2 * shape.heads * shape.dim * DTYPE.itemsize
    return Timing(call, sum(ends) * (entry + 4) + 2 * q.nbytes)


def packed(shape: Shape, device: str, *, codec: Any) -> Timing:
    """Attend drafting rows whose prompt is coded, every token of it."""
    from vericache_kernels.packed_attention import (
        ExactRows,
        PackedRows,
        packed_attention,
    )

    own, step, extra = codec(shape)
    draft = _encoded(own, shape)
    half = next(i for i, f in enumerate(step.fields) if f.startswith("value"))
    segments = shape.rows * shape.tokens // shape.segment
    sides = [
        arena(draft, fields, segments)
        for fields in (step.fields[:half], step.fields[half:])
    ]
    counts = [shape.segment] * segments
    moved = {name: tensor.to(device) for name, tensor in extra.items()}
    rows = PackedRows(
        *(content.to(device) for content, _ in sides),
        torch.cat([offsets for _, offsets in sides], dim=1).to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        _sums([segments // shape.rows] * shape.rows, device),
        positions=torch.arange(shape.tokens, dtype=torch.int32, device=device).repeat(
            shape.rows
        ),
        places=_sums(counts, device)[:-1].to(torch.int64),
        **moved,
    )
    exact = ExactRows(
        *(
            torch.zeros(
                2 * shape.rows, shape.heads, shape.dim, dtype=DTYPE, device=device
            )
            for _ in range(2)
        ),
        torch.arange(shape.rows, dtype=torch.int32, device=device),
        _sums([1] * shape.rows, device),
    )
    q = _queries(shape, shape.rows, device)[:, None]
    call = partial(packed_attention, q, rows, exact, step, shape.dim**-0.5)
    coded = sum(draft.tensors[name].nbytes for name in step.fields) * segments
    return Timing(call, coded + 2 * q.nbytes)


def split_planes(exponent: int, mantissa: int, shape: Shape) -> tuple[Any, Any, Any]:
    """Return the codec, the kernel's record of it, and its tables: none."""
    from vericache_kernels.packed_attention import SplitPlanesStep
    from vericache_sglang.compression.codecs.split_planes import SplitPlanes

    return SplitPlanes(exponent, mantissa), SplitPlanesStep(exponent, mantissa), {}


def kivi(bits: int, shape: Shape) -> tuple[Any, Any, Any]:
    """See ``split_planes``."""
    from vericache_kernels.packed_attention import KIVIStep
    from vericache_sglang.compression.codecs.kivi import KIVI

    return KIVI(bits, 32, window=0), KIVIStep(bits, 32), {}


def kvquant(shape: Shape) -> tuple[Any, Any, Any]:
    """See ``split_planes``; thresholds and books as of no model."""
    from vericache_kernels.packed_attention import KVQuantStep
    from vericache_sglang.compression.codecs.kvquant import KVQuant
    from vericache_sglang.compression.codecs.kvquant_tables import KVQuantTables

    columns, cap, bits = shape.heads * shape.dim, 0.01, 4
    low, high = torch.full((1, columns), -2.0), torch.full((1, columns), 2.0)
    books = torch.linspace(-1, 1, 2**bits).expand(2, 1, -1)
    own = KVQuantTables(Path("none"), "none", cap, low, high, *books)
    rope, table = _rope(shape)
    flat = torch.cat([(high + low)[0] / 2, (high - low)[0] / 2, *books[:, 0]])
    step = KVQuantStep(bits, math.ceil(cap * columns - 1e-9))
    codec = KVQuant(own, cap, sinks=0).bind(rope)
    return codec, step, {"tables": flat, "rope": table}


def rotatekv(shape: Shape) -> tuple[Any, Any, Any]:
    """See ``split_planes``; the order of channels is that of the model."""
    from vericache_kernels.packed_attention import RotateKVStep
    from vericache_sglang.compression.codecs.rotatekv import RotateKV
    from vericache_sglang.compression.codecs.rotatekv_tables import RotateKVTables

    columns, rotated = shape.heads * shape.dim, min(4, shape.heads)
    group = min(128, columns)
    order = torch.arange(columns)
    tables = RotateKVTables(Path("none"), "none", rotated, order[None])
    rope, table = _rope(shape)
    codec = RotateKV(tables, 4, group, 1.0).bind(rope)
    extra = {"order": order.to(torch.int32), "rope": table}
    return codec, RotateKVStep(4, group, rotated), extra


def _rope(shape: Shape) -> tuple[Any, torch.Tensor]:
    """Return a rotation, and the kernel's table of it."""
    from vericache_sglang.compression.codecs.rope import Rope

    half = shape.dim // 2
    frequencies = 1e4 ** -(torch.arange(half) / half)
    angles = torch.arange(shape.tokens)[:, None] * frequencies
    return Rope(frequencies, 1.0), torch.cat([angles.cos(), angles.sin()], dim=1)


def _encoded(codec: Any, shape: Shape) -> Any:
    """Return the draft part of one segment of random KV."""
    size = (shape.heads, shape.segment, shape.dim)
    keys, values = (torch.randn(size).to(DTYPE) for _ in range(2))
    draft, _ = codec.encode(keys, values, positions=torch.arange(shape.segment))
    return draft


def arena(
    part: Any, fields: Sequence[str], copies: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of copies of a part, and where the fields of each begin."""
    pieces, starts, size = [], [], 0
    for name in fields:
        content = part.tensors[name].contiguous().view(torch.uint8).flatten()
        gap = -len(content) % ALIGN
        starts.append(size)
        pieces += [content, torch.zeros(gap, dtype=torch.uint8)]
        size += len(content) + gap
    offsets = torch.arange(copies)[:, None] * size + torch.tensor(starts)
    return torch.cat(pieces).repeat(copies), offsets


def _queries(shape: Shape, count: int, device: str) -> torch.Tensor:
    heads = shape.heads * shape.group
    return torch.randn(count, heads, shape.dim, device=device).to(DTYPE)


def _sums(counts: Sequence[int], device: str) -> torch.Tensor:
    """Return [0, first count, sum of the first two, ...] int32."""
    return torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
