"""Attention of a mixed batch: rows with one or several queries, in one launch.

A draft row has one query token, a verification d + 1, and each reads its slots through
a row of SGLang's block table. The rows, their lengths and their slots are read on the
device, so one captured graph serves every batch of its size.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vericache_kernels.ragged_attention.ref import ragged_attention_ref
from vericache_kernels.ragged_attention.rows import RaggedRows, check_rows

if TYPE_CHECKING:
    import torch

__all__ = ["SPLITS", "RaggedRows", "ragged_attention", "ragged_attention_ref"]

SPLITS = 16
"""Default number of programs that share a row and a KV head."""


def ragged_attention(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    rows: RaggedRows,
    scaling: float,
    *,
    most_queries: int,
    splits: int = SPLITS,
) -> torch.Tensor:
    """Compute attention of every row's query tokens over the row, causally.

    Query i of n sees the entries ``begin`` to ``end - n + i`` of its row; the order of
    entries does not matter otherwise. Masked entries and unlisted slots may hold NaN. A
    query that sees no entry yields zeros.

    Safe in a CUDA graph: the grid depends on R, T and ``splits`` only, and nothing
    synchronises. Tiles of entries, counted from ``begin``, are assigned to splits round
    robin, so a token's result depends neither on other rows nor on the number of later
    queries (flash decoding, arXiv:2311.01282, with fixed tiles).

    If a value among the last n entries of a row is not finite, the queries that see it
    get NaN for the whole head, also if the value is infinite.

    Args:
        q: [T, Hq, D] bfloat16, float16 or float32, contiguous in heads and D; on a GPU
            D is a power of two from 16 to 128.
        kv: K and V [slots, H, D] of one layer, dtype of ``q``, same strides, contiguous
            in D; H divides Hq.
        rows: Query tokens and entries of the rows, in this layer.
        scaling: Factor on the scores, positive, usually D ** -0.5.
        most_queries: Expected maximum query tokens of a row, at least 1. Longer rows
            work too; it sets the block size, so results may change in the last bits
            with it.
        splits: Programs that share a row and a KV head, a power of two.

    Returns:
        [T, Hq, D], dtype of ``q``, contiguous. On a GPU products are taken in that
        dtype and summed in float32; elsewhere see ``ragged_attention_ref``.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    check_rows(q, kv, rows, scaling, most_queries, splits)
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return ragged_attention_ref(q, kv, rows, scaling)
    from vericache_kernels.ragged_attention.triton_impl import launch

    return launch(q, kv, rows, scaling, most_queries, splits)
