"""Attention of a few query tokens over the contiguous slot runs of one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_kernels.run_attention.ref import attend_row
from vericache_kernels.run_attention.runs import (
    RowPlan,
    plan_row,
    run_slots,
    slot_runs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = [
    "RowPlan",
    "attend_row",
    "plan_row",
    "run_attention",
    "run_slots",
    "slot_runs",
]


def run_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    runs: Sequence[tuple[int, int]],
    scaling: float,
) -> torch.Tensor:
    """Compute attention of the last n entries of a row over the row, causally.

    Query i sees row entries [0, L - n + i]; masked entries may hold NaN. Cost is
    O(L * n); long runs are read in place, short ones are copied together once. For many
    layers, plan the row once with ``plan_row`` and call ``attend_row``.

    Args:
        q: [n, Hq, D], any float dtype, on the CPU.
        k_buffer: [slots, Hkv, D] of one layer, dtype of ``q``; may be strided,
            contiguous in D; Hkv divides Hq.
        v_buffer: As ``k_buffer``.
        runs: (first slot, length) in row order, L slots in total, L >= n >= 1; the
            last n entries are the query tokens themselves.
        scaling: Factor on the scores, usually D ** -0.5.

    Returns:
        [n, Hq, D], dtype of ``q``, contiguous.

    Raises:
        ValueError: n is outside [1, L], or shapes, dtypes or devices do not fit.
    """
    plan = plan_row(run_slots(runs), q.shape[0])
    return attend_row(q, k_buffer, v_buffer, plan, scaling)
