"""CPU attention over slot runs: one kernel call per run, merged by log-sum-exp."""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING

import torch

from vericache_kernels.run_attention.runs import (
    MOST_MASKED_QUERIES,
    MOST_SLOTS_A_PART,
    Piece,
    RowPlan,
    plan_row,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

Part = tuple[torch.Tensor, torch.Tensor]
"""Attention over some of a row's keys: output [1, Hkv, n * G, D], and the log-sum-exp
of its scores [1, Hkv, n * G] float32. Row ``i * G + g`` is query i of a group's head g.
"""


def attend_row(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: RowPlan,
    scaling: float,
    seen: Sequence[Part] = (),
) -> torch.Tensor:
    """See ``run_attention``; takes a planned row, so that layers share the plan.

    Shapes: n queries, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head dim.

    Args:
        q: See ``run_attention``.
        k_buffer: See ``run_attention``.
        v_buffer: See ``run_attention``.
        scaling: See ``run_attention``.
        seen: Results of ``part_of`` for keys outside the plan that all n queries see;
            merged into the same softmax.

    Raises:
        ValueError: q does not fit the plan or the KV buffers.
    """
    _check(q, k_buffer, v_buffer, plan)
    whole = _attend(q, k_buffer, v_buffer, plan, scaling, seen)
    # A masked entry has weight zero, and zero times NaN is NaN.
    if plan.last is None or isfinite(whole.sum().item()):
        return whole
    n = plan.query_len
    blocks = _blocks_apart(k_buffer, v_buffer, plan.last, n)
    if len(blocks) == 1:
        return whole
    before, group = plan.slots.numel() - n, q.shape[1] // k_buffer.shape[1]
    outs = []
    for start, stop in zip(blocks, [*blocks[1:], n], strict=True):
        # The block's queries, and the row up to the last of them.
        part = plan_row(plan.slots[: before + stop], stop - start)
        rows = slice(start * group, stop * group)
        own = [(out[:, :, rows], lse[:, :, rows]) for out, lse in seen]
        outs.append(_attend(q[start:stop], k_buffer, v_buffer, part, scaling, own))
    return torch.cat(outs)


def fold_queries(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshape q [n, Hq, D] to [1, Hkv, n * G, D], to read K and V once per group."""
    n, heads, dim = q.shape
    group = heads // kv_heads
    rows = q.reshape(n, kv_heads, group, dim).transpose(0, 1)
    return rows.reshape(1, kv_heads, n * group, dim)


def unfold_queries(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Reshape rows [1, Hkv, n * G, D] back to ``shape`` [n, Hq, D], contiguous."""
    n, heads, dim = shape
    kv_heads = rows.shape[1]
    apart = rows.view(kv_heads, n, heads // kv_heads, dim)
    return apart.transpose(0, 1).reshape(shape)


def _attend(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: RowPlan,
    scaling: float,
    seen: Sequence[Part],
) -> torch.Tensor:
    """Compute ``attend_row`` if all masked entries are finite."""
    rows = fold_queries(q, k_buffer.shape[1])
    parts = list(seen)
    for piece in plan.pieces:
        k, v = _entries(k_buffer, piece), _entries(v_buffer, piece)
        parts.append(part_of(rows, k, v, scaling))
    if plan.last is not None:
        k, v = _entries(k_buffer, plan.last), _entries(v_buffer, plan.last)
        parts.append(_causal(rows, k, v, scaling, plan.query_len))
    return unfold_queries(merge(parts), q.shape)


def _entries(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return K or V [len, Hkv, D] of a piece."""
    if isinstance(piece, torch.Tensor):
        return buffer.index_select(0, piece)
    start, length = piece
    return buffer[start : start + length]


def part_of(
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> Part:
    """Compute attention of rows [1, Hkv, R, D] over keys [len, Hkv, D] without copies.

    Returns:
        Output [1, Hkv, R, D], strided, and log-sum-exp [1, Hkv, R] float32.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows,
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        0.0,
        causal,
        attn_mask=mask,
        scale=scaling,
    )
    return out, lse


def _causal(
    rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, n: int
) -> Part:
    """Compute causal attention of rows [1, Hkv, n * G, D] over the last piece."""
    _, kv_heads, folded, dim = rows.shape
    group = folded // n
    if n <= MOST_MASKED_QUERIES:
        stop = MOST_SLOTS_A_PART + n
        mask = _mask(group, rows.dtype)[:, :, :folded, stop - len(k) : stop]
        return part_of(rows, k, v, scaling, mask=mask)
    by_group = rows.view(1, kv_heads, n, group, dim)
    parts = [
        part_of(by_group[:, :, :, g], k, v, scaling, causal=True) for g in range(group)
    ]
    out = torch.stack([out for out, _ in parts], dim=3)
    lse = torch.stack([lse for _, lse in parts], dim=3)
    return out.view(rows.shape), lse.view(rows.shape[:3])


@lru_cache(maxsize=4)
def _mask(group: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask of the most queries behind the most entries that all see.

    Returns:
        [1, 1, MOST_MASKED_QUERIES * G, MOST_SLOTS_A_PART + MOST_MASKED_QUERIES]; the
        mask of fewer queries or entries is a part of it.
    """
    size = (MOST_MASKED_QUERIES, MOST_SLOTS_A_PART + MOST_MASKED_QUERIES)
    hidden = torch.full(size, float("-inf"), dtype=dtype).triu_(MOST_SLOTS_A_PART + 1)
    return hidden.repeat_interleave(group, dim=0)[None, None]


def merge(parts: Sequence[Part]) -> torch.Tensor:
    """Merge outputs [1, Hkv, n * G, D] of parts by their share of the softmax mass."""
    first = parts[0][0]
    if len(parts) == 1:
        return first
    weight = torch.stack([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
    out = first * weight[0]
    for (more, _), share in zip(parts[1:], weight[1:], strict=True):
        out.addcmul_(more, share)
    return out.to(first.dtype)


def _blocks_apart(
    k_buffer: torch.Tensor, v_buffer: torch.Tensor, last: Piece, n: int
) -> list[int]:
    """Return the queries at which the row must be cut, starting with 0.

    Cutting before every entry that is not finite keeps it out of the blocks of queries
    that must not see it.
    """
    k, v = _entries(k_buffer, last)[-n:], _entries(v_buffer, last)[-n:]
    finite = torch.isfinite(k).all(-1).all(-1) & torch.isfinite(v).all(-1).all(-1)
    return sorted({0, *torch.nonzero(~finite).flatten().tolist()})


def _check(
    q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, plan: RowPlan
) -> None:
    """Validate shapes, dtypes and devices."""
    if q.device.type != "cpu":
        raise ValueError(f"run_attention runs on the CPU, q is on {q.device}")
    if q.shape[0] != plan.query_len:
        raise ValueError(f"q has {q.shape[0]} rows, the plan {plan.query_len}")
    if k_buffer.shape != v_buffer.shape or q.shape[2] != k_buffer.shape[2]:
        raise ValueError(
            f"head dims differ: q {tuple(q.shape)}, k {tuple(k_buffer.shape)}, "
            f"v {tuple(v_buffer.shape)}"
        )
    if q.shape[1] % k_buffer.shape[1]:
        raise ValueError(f"{q.shape[1]} heads do not share {k_buffer.shape[1]}")
    if not q.dtype == k_buffer.dtype == v_buffer.dtype:
        raise ValueError(f"q is {q.dtype}, K {k_buffer.dtype}, V {v_buffer.dtype}")
