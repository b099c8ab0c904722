"""Kernel inputs of packed attention: coded segments and exact slots of rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vericache_kernels.packed_attention.steps import DecodeStep

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of queries and KV."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """The coded segments of R rows in one layer, all on one device.

    A field is a contiguous tensor of the codec's draft KV at a byte offset that is a
    multiple of 16.

    Attributes:
        key_bytes: [*] uint8, buffer of the key fields, e.g. a pool of KV slots.
        value_bytes: [*] uint8, buffer of the value fields; may be ``key_bytes``.
        offsets: [S, F] int64, byte offsets of the fields of each segment in the order
            of ``DecodeStep.fields``.
        tokens: [S] int32, coded tokens of a segment, >= 0.
        first: [R + 1] int32; row r has segments ``first[r]`` to ``first[r + 1]``.
        positions: [*] int32, positions of the coded tokens, for steps that need them;
            else None.
        places: [S, H] int64, index of a segment's first position in each head, whose
            tokens may differ; None as ``positions``.
        tables: [*] float32, calibration tables; None if the step needs none.
        order: [C] int32, channel permutation; None if the step needs none.
        rope: [positions, D] float32, cosines then sines of every position with the
            model's amplitude, for steps that rotate keys; else None.
    """

    key_bytes: torch.Tensor
    value_bytes: torch.Tensor
    offsets: torch.Tensor
    tokens: torch.Tensor
    first: torch.Tensor
    positions: torch.Tensor | None = None
    places: torch.Tensor | None = None
    tables: torch.Tensor | None = None
    order: torch.Tensor | None = None
    rope: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ExactRows:
    """The exact slots of R rows in one layer.

    Attributes:
        k_buffer: [slots, H, D], dtype of the queries, contiguous in D.
        v_buffer: As ``k_buffer``, same strides.
        slots: [*] int32 slot ids, row after row, the query tokens of a row last.
        first: [R + 1] int32; row r has ``slots[first[r] : first[r + 1]]``. If there
            are fewer than queries, the first queries have no slot and see none.
    """

    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    slots: torch.Tensor
    first: torch.Tensor


def check_rows(
    q: torch.Tensor,
    packed: PackedRows,
    exact: ExactRows,
    step: DecodeStep,
    splits: int,
) -> None:
    """Validate shapes, dtypes and devices; does not read tensor contents.

    Raises:
        ValueError: See ``packed_attention``.
    """
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"packed_attention runs on a GPU, q is on {q.device}")
    _check_exact(q, exact)
    rows, _, _, dim = q.shape
    if splits < 1 or splits & (splits - 1):
        raise ValueError(f"splits must be a power of two, got {splits}")
    if not len(packed.first) == len(exact.first) == rows + 1:
        raise ValueError(
            f"{rows} rows of queries, {len(packed.first) - 1} of segments, "
            f"{len(exact.first) - 1} of exact slots"
        )
    wanted = (len(packed.tokens), len(step.fields))
    if tuple(packed.offsets.shape) != wanted:
        raise ValueError(f"offsets must be {wanted}, are {tuple(packed.offsets.shape)}")
    for name in step.wants:
        if getattr(packed, name) is None:
            raise ValueError(f"{type(step).__name__} needs packed.{name}")
    heads = (len(packed.tokens), exact.k_buffer.shape[1])
    if packed.places is not None and tuple(packed.places.shape) != heads:
        raise ValueError(f"places must be {heads}, are {tuple(packed.places.shape)}")
    step.check(exact.k_buffer.shape[1], dim)


def _check_exact(q: torch.Tensor, exact: ExactRows) -> None:
    """Validate queries [R, N, Hq, D] against the buffers.

    Raises:
        ValueError: They do not fit.
    """
    _, _, heads, dim = q.shape
    kv = exact.k_buffer
    if kv.shape != exact.v_buffer.shape or kv.stride() != exact.v_buffer.stride():
        raise ValueError("K and V buffers differ in shape or strides")
    if heads % kv.shape[1] or kv.shape[2] != dim or kv.stride(2) != 1:
        raise ValueError(f"q {tuple(q.shape)} does not fit KV {tuple(kv.shape)}")
    if q.dtype not in FLOATS or not q.dtype == kv.dtype == exact.v_buffer.dtype:
        raise ValueError(f"q is {q.dtype}, KV {kv.dtype}: one of bf16, fp16, fp32")
    if not q.is_contiguous() or not 16 <= dim <= 128 or dim & (dim - 1):
        raise ValueError(
            "q must be contiguous with D a power of two from 16 to 128, is "
            f"{tuple(q.shape)} {tuple(q.stride())}"
        )
