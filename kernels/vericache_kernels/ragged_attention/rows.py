"""Kernel inputs of ragged attention: block-table ranges and query tokens of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of queries and KV."""
INTEGERS = (torch.int32, torch.int64)
"""Dtypes of indices."""


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRows:
    """R rows, each a range of entries of one block-table row.

    All tensors are on the device of the queries; their contents are read there, so a
    captured graph reads their values at replay.

    Attributes:
        table: [rows, width] int32 slot ids, contiguous in the width; SGLang's
            ``req_to_token``.
        row: [R] int32 or int64, the block-table row of each row.
        first: [R + 1] int32 or int64, ascending; row r has the query tokens
            ``first[r]`` to ``first[r + 1]``, none for a dummy row. Tokens from
            ``first[R]`` on belong to no row.
        begin: [R] int32 or int64, first entry that is read; or [layers, R] if layers
            differ, then ``at`` selects a layer.
        end: As ``begin``, one past the last entry; the query tokens are the last
            entries of their row.
    """

    table: torch.Tensor
    row: torch.Tensor
    first: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor

    def at(self, layer: int) -> RaggedRows:
        """Return the rows of one layer; views, so a graph may hold them.

        Raises:
            IndexError: Layers differ, and there is no such layer.
        """
        if self.begin.dim() == self.end.dim() == 1:
            return self
        begin, end = (
            bound if bound.dim() == 1 else bound[layer]
            for bound in (self.begin, self.end)
        )
        return replace(self, begin=begin, end=end)


def check_rows(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    rows: RaggedRows,
    scaling: float,
    most_queries: int,
    splits: int,
) -> None:
    """Validate shapes, dtypes and devices; does not read tensor contents.

    Raises:
        ValueError: See ``ragged_attention``.
    """
    _check_kv(q, *kv)
    if not scaling > 0:
        raise ValueError(f"scaling must be positive, got {scaling}")
    if most_queries < 1:
        raise ValueError(f"most_queries must be at least 1, got {most_queries}")
    if splits < 1 or splits & (splits - 1):
        raise ValueError(f"splits must be a power of two, got {splits}")
    _check_places(rows, q.device)


def _check_kv(q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor) -> None:
    """Validate queries [T, Hq, D] against the buffers of a layer.

    Raises:
        ValueError: They do not fit.
    """
    shapes = f"q {tuple(q.shape)}, K {tuple(k_buffer.shape)}"
    if q.dim() != 3 or k_buffer.dim() != 3:
        raise ValueError(f"q must be [T, Hq, D] and K [slots, H, D]: {shapes}")
    if k_buffer.shape != v_buffer.shape or k_buffer.stride() != v_buffer.stride():
        raise ValueError("K and V buffers differ in shape or strides")
    heads, dim = q.shape[1:]
    if heads % k_buffer.shape[1] or k_buffer.shape[2] != dim:
        raise ValueError(f"query heads or head dim do not fit: {shapes}")
    if q.dtype not in FLOATS or not q.dtype == k_buffer.dtype == v_buffer.dtype:
        raise ValueError(
            f"q is {q.dtype}, KV {k_buffer.dtype}: one of bf16, fp16, fp32"
        )
    if q.stride()[1:] != (dim, 1) or k_buffer.stride(2) != 1:
        raise ValueError("q must be contiguous in heads and D, KV in D")
    if not 16 <= dim <= 128 or dim & (dim - 1):
        raise ValueError(f"D must be a power of two from 16 to 128, is {dim}")


def _check_places(rows: RaggedRows, device: torch.device) -> None:
    """Validate the tensors of the rows against each other.

    Raises:
        ValueError: They do not fit.
    """
    count = len(rows.row)
    fits: dict[str, Callable[[torch.Tensor], bool]] = {
        "table": lambda t: t.dim() == 2 and t.stride(1) == 1,
        "row": lambda t: t.dim() == 1,
        "first": lambda t: t.shape == (count + 1,),
        "begin": lambda t: t.shape == (count,),
        "end": lambda t: t.shape == (count,),
    }
    for name, fit in fits.items():
        tensor: torch.Tensor = getattr(rows, name)
        if tensor.dtype not in INTEGERS or tensor.device != device:
            raise ValueError(
                f"rows.{name} must be int32 or int64 on {device}, "
                f"is {tensor.dtype} on {tensor.device}"
            )
        if not fit(tensor) or tensor.stride(-1) != 1:
            raise ValueError(
                f"rows.{name} does not fit {count} rows: {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}"
            )
