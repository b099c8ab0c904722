"""Torch reference of ragged attention: one row at a time, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vericache_kernels.ragged_attention.rows import RaggedRows


def ragged_attention_ref(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    rows: RaggedRows,
    scaling: float,
) -> torch.Tensor:
    """See ``ragged_attention``; any device, any D, any number of queries a row.

    Products and sums are float32. Reads the contents of ``rows`` on the host, so it
    waits for the device and cannot be captured.

    Returns:
        [T, Hq, D], dtype of ``q``, contiguous.
    """
    first, begin, end = (t.tolist() for t in (rows.first, rows.begin, rows.end))
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for r, table_row in enumerate(rows.row.tolist()):
        slots = rows.table[table_row, begin[r] : end[r]].to(torch.int64)
        queries = q[first[r] : first[r + 1]]
        if len(slots) and len(queries):
            keys, values = (buffer[slots].float() for buffer in kv)
            out[first[r] : first[r + 1]] = _attend(queries, keys, values, scaling)
    return out


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return attention [n, Hq, D] of the last n entries over K and V [L, H, D]."""
    n, heads, dim = queries.shape
    length, kv_heads, _ = keys.shape
    folded = queries.float().view(n, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("nhgd,lhd->hgnl", folded, keys) * scaling
    where = torch.arange(length, device=keys.device)
    last = torch.arange(length - n, length, device=keys.device)
    hidden = where[None, :] > last[:, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    # A query before its row's first entry sees no entry.
    weights = scores.softmax(-1).masked_fill(hidden.all(-1)[:, None], 0.0)
    out = [_weigh(weights[:, :, i], values, hidden[i]) for i in range(n)]
    return torch.stack(out).reshape(n, heads, dim).to(queries.dtype)


def _weigh(
    weights: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Return [H, G, D]; masked values have weight 0, even if they are not finite."""
    seen = values.masked_fill(hidden[:, None, None], 0.0)
    return torch.einsum("hgl,lhd->hgd", weights, seen)
