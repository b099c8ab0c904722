"""Attention of a mixed batch: rows of one query and of several, in one launch.

A draft row has one query token, a verification d + 1, and each reads its own slots
through a row of SGLang's table. Which rows there are, how long they are and what they
list is read on the device, so one captured graph serves every batch of its size.
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
"""Programs that share a row and a KV head where the caller does not say."""


def ragged_attention(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    rows: RaggedRows,
    scaling: float,
    *,
    most_queries: int,
    splits: int = SPLITS,
) -> torch.Tensor:
    """Attend every row's query tokens to the row, causally among themselves.

    Query i of n sees the entries ``begin`` to ``end - n + i`` of its row; the order of
    entries does not matter otherwise. Entries it does not see, and slots no row lists,
    may hold NaN. A row or token without anything to see gives zeros.

    Safe in a CUDA graph: the grid follows from R, T and ``splits``, and nothing waits
    for the host. Entries go round robin over the splits in tiles that are
    counted from ``begin``, so a token's result depends neither on the other rows nor on
    how many queries follow it (flash decoding, arXiv:2311.01282, with fixed tiles).

    Where a value among the last n entries of a row is not finite, the queries that see
    it get NaN for the whole head, also where the value was infinite.

    Args:
        q: [T, Hq, D] bfloat16, float16 or float32, contiguous in heads and D; on a GPU
            D is a power of two from 16 to 128.
        kv: K and V [slots, H, D] of one layer, dtype of ``q``, same strides, contiguous
            in D; H divides Hq.
        rows: Which tokens belong to which row and what the rows list, in this layer.
        scaling: Factor on the scores, positive, usually D ** -0.5.
        most_queries: Most query tokens of a row, at least 1. Longer ones are served
            too; it only says how many are attended together, so it should not change.
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
