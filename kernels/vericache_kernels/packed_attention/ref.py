"""Draft attention on a CPU, which decodes one segment at a time."""

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
    """Compute attention of one row over its coded segments and its exact slots.

    The result is that of one softmax over all of them; partial results are merged by
    log-sum-exp, so the order of segments matters only for rounding. Only one segment is
    decoded at a time. NaN and infinities in a segment affect only the query heads of
    their KV head in this row.

    Args:
        q: [n, Hq, D], any float dtype, on the CPU.
        segments: Each returns keys and values [H, t, D] in the dtype of ``q``, any
            strides, t >= 0; every query sees all t. Consumed once, in order.
        k_buffer: [slots, H, D] of one layer, as for ``run_attention``.
        v_buffer: As ``k_buffer``.
        plan: The exact slots, the n query tokens last; None if there are none.
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
    """Compute attention over one segment; frees its decoded KV before returning.

    Args:
        rows: [1, H, n * G, D], the folded queries.
        segment: See ``attend_packed``.
        scaling: Factor on the scores.

    Returns:
        None if the segment has no tokens.

    Raises:
        ValueError: The segment does not fit the queries.
    """
    keys, values = segment()
    _, heads, _, dim = rows.shape
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
