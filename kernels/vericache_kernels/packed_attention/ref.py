"""Draft attention on a CPU: one segment is decoded, attended and forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vericache_kernels.run_attention.ref import (
    Part,
    attend_row,
    fold_queries,
    merge,
    part_of,
    unfold_queries,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vericache_kernels.run_attention.runs import RowPlan

Segment = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Decodes a segment: keys and values, both [H, t, D]."""


def attend_packed(
    q: torch.Tensor,
    segments: Iterable[Segment],
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: RowPlan | None,
    scaling: float,
) -> torch.Tensor:
    """Attend the queries of one row to its coded segments and its exact slots.

    The result is that of one softmax over all of them; parts are merged by their
    log-sum-exp, so the order of the segments does not matter beyond rounding. At any
    time one segment is decoded. Segments may decode to anything: NaN and infinities
    reach the query heads that read their KV head, in this row, and nothing else.

    Args:
        q: [n, Hq, D], any float dtype, on the CPU.
        segments: Each decodes to keys and values [H, t, D] in the dtype of ``q``, any
            strides, t >= 0; every query sees all t. Consumed once, in order.
        k_buffer: [slots, H, D] of one layer, as ``run_attention`` takes it.
        v_buffer: As ``k_buffer``.
        plan: The exact slots, the n query tokens last; None: there are none.
        scaling: Factor on the scores, usually D ** -0.5.

    Returns:
        [n, Hq, D], dtype of ``q``, contiguous.

    Raises:
        ValueError: A segment or the plan does not fit ``q``, or the row is empty.
    """
    kv_heads = k_buffer.shape[1]
    if q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} heads do not share {kv_heads}")
    rows = fold_queries(q, kv_heads)
    found = (_part(rows, segment, scaling) for segment in segments)
    parts = [part for part in found if part is not None]
    if plan is not None:
        return attend_row(q, k_buffer, v_buffer, plan, scaling, seen=parts)
    if not parts:
        raise ValueError("the row is empty: no coded tokens and no exact slots")
    return unfold_queries(merge(parts), q.shape)


def _part(rows: torch.Tensor, segment: Segment, scaling: float) -> Part | None:
    """Attend to one segment; what it decodes to lives no longer than this call.

    Args:
        rows: [H, n * G, D], the folded queries.
        segment: See ``attend_packed``.
        scaling: Factor on the scores.

    Returns:
        None where the segment has no tokens.

    Raises:
        ValueError: The segment does not fit the queries.
    """
    keys, values = segment()
    heads, _, dim = rows.shape
    tokens = keys.shape[1] if keys.dim() == 3 else -1
    for name, entries in (("keys", keys), ("values", values)):
        if entries.shape != (heads, tokens, dim) or entries.dtype != rows.dtype:
            raise ValueError(
                f"a segment's {name} must be [{heads}, t, {dim}] {rows.dtype}, "
                f"got {tuple(entries.shape)} {entries.dtype}"
            )
    if not tokens:
        return None
    return part_of(rows, keys.transpose(0, 1), values.transpose(0, 1), scaling)
