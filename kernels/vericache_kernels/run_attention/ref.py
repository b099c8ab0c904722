"""CPU attention over slot runs: one kernel call per run, merged by log-sum-exp."""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING

import torch

from vericache_kernels.run_attention.runs import RowPlan, plan_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Up to this many queries the causal square is one call with a mask; above it, one
# causal call per query head of a group, which skips the masked half.
MOST_MASKED_QUERIES = 160

Part = tuple[torch.Tensor, torch.Tensor]
"""Attention over some of a row's keys: output [Hkv, n * G, D], and the log-sum-exp of
its scores [Hkv, n * G, 1] float32. Row ``i * G + g`` is query i of a group's head g."""


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
    n = plan.query_len
    blocks = [0]
    if n > 1:
        blocks = _blocks_apart(_tail(k_buffer, plan), _tail(v_buffer, plan))
    if len(blocks) == 1:
        return _attend(q, k_buffer, v_buffer, plan, scaling, seen)
    before, group = plan.slots.numel() - n, q.shape[1] // k_buffer.shape[1]
    outs = []
    for start, stop in zip(blocks, [*blocks[1:], n], strict=True):
        # The block's queries, and the row up to the last of them.
        part = plan_row(plan.slots[: before + stop], stop - start)
        rows = slice(start * group, stop * group)
        own = [(out[:, rows], lse[:, rows]) for out, lse in seen]
        outs.append(_attend(q[start:stop], k_buffer, v_buffer, part, scaling, own))
    return torch.cat(outs)


def fold_queries(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshape q [n, Hq, D] to rows [Hkv, n * G, D], to read K and V once per group."""
    n, heads, dim = q.shape
    group = heads // kv_heads
    rows = q.reshape(n, kv_heads, group, dim).transpose(0, 1)
    return rows.reshape(kv_heads, n * group, dim)


def unfold_queries(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Reshape rows [Hkv, n * G, D] back to ``shape`` [n, Hq, D]."""
    n, heads, dim = shape
    kv_heads = rows.shape[0]
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
    for k, v in _seen_by_all(k_buffer, v_buffer, plan):
        parts.append(part_of(rows, k, v, scaling))
    if plan.query_len > 1:
        tail_k, tail_v = _tail(k_buffer, plan), _tail(v_buffer, plan)
        parts.append(_causal(rows, tail_k, tail_v, scaling))
    return unfold_queries(merge(parts), q.shape)


def _seen_by_all(
    k_buffer: torch.Tensor, v_buffer: torch.Tensor, plan: RowPlan
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield K and V [len, Hkv, D] of the entries that every query of the row sees."""
    for start, length in plan.views:
        yield k_buffer[start : start + length], v_buffer[start : start + length]
    for slots in plan.gathered:
        yield k_buffer.index_select(0, slots), v_buffer.index_select(0, slots)


def _tail(buffer: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """Return K or V [n, Hkv, D] of the query tokens themselves."""
    if plan.tail is not None:
        return buffer.index_select(0, plan.tail)
    return buffer[plan.tail_start : plan.tail_start + plan.query_len]


def part_of(
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> Part:
    """Compute attention of rows [Hkv, R, D] over keys [len, Hkv, D] without copies.

    Returns:
        Output [Hkv, R, D] and log-sum-exp [Hkv, R, 1] float32.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows.unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        0.0,
        causal,
        attn_mask=mask,
        scale=scaling,
    )
    return out[0], lse[0].unsqueeze(-1)


def _causal(
    rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
) -> Part:
    """Compute causal attention of folded rows [Hkv, n * G, D] over their n keys."""
    kv_heads, folded, dim = rows.shape
    n = k.shape[0]
    group = folded // n
    if n <= MOST_MASKED_QUERIES:
        return part_of(rows, k, v, scaling, mask=_mask(n, group, rows.dtype))
    by_group = rows.view(kv_heads, n, group, dim)
    parts = [
        part_of(by_group[:, :, g], k, v, scaling, causal=True) for g in range(group)
    ]
    out = torch.stack([out for out, _ in parts], dim=2)
    lse = torch.stack([lse for _, lse in parts], dim=2)
    return out.view(kv_heads, folded, dim), lse.view(kv_heads, folded, 1)


@lru_cache(maxsize=64)
def _mask(n: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask [1, 1, n * G, n] of n queries over their own keys."""
    hidden = torch.full((n, n), float("-inf"), dtype=dtype).triu_(1)
    return hidden.repeat_interleave(group, dim=0).view(1, 1, n * group, n)


def merge(parts: Sequence[Part]) -> torch.Tensor:
    """Merge partial outputs [Hkv, n * G, D] by their share of the softmax mass."""
    if len(parts) == 1:
        return parts[0][0].contiguous()
    weight = torch.stack([lse for _, lse in parts]).softmax(0)
    out = parts[0][0] * weight[0]
    for (more, _), share in zip(parts[1:], weight[1:], strict=True):
        out.addcmul_(more, share)
    return out.to(parts[0][0].dtype)


def _blocks_apart(k: torch.Tensor, v: torch.Tensor) -> list[int]:
    """Return the queries at which the row must be cut, starting with 0.

    A masked entry has weight zero, and zero times NaN is NaN. Cutting before every
    entry that is not finite keeps it out of the blocks of queries that must not see it.
    """
    if isfinite((k.sum() + v.sum()).item()):
        return [0]
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
