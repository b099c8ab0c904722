"""Triton functions for splits, shared by both attention kernels: store and merge."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""Factor from natural scores to base-2 exponents."""
LEAST_LANES = 16
"""Minimum rows of a tensor-core product."""
NUM_WARPS = 4


@triton.jit
def store_split(
    out_at: tl.tensor,
    lse_at: tl.tensor,
    token: tl.tensor,
    heads: tl.tensor,
    head: tl.tensor,
    asked: tl.tensor,
    acc: tl.tensor,
    top: tl.tensor,
    mass: tl.tensor,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Store the partial results of M lanes; the split is ``program_id(2)``.

    Args:
        out_at: [T, Hq, SPLITS, D] float32, not written for an empty split.
        lse_at: [T, Hq, SPLITS] float32, to base 2, -inf for an empty split.
        token: [M] int64, token indices.
        heads: Hq, query heads.
        head: [M], query head of each lane.
        asked: [M] bool mask; False: nothing is stored.
        acc: [M, D] float32, values weighted by ``2 ** (score - top)``.
        top: [M] float32, the largest score.
        mass: [M] float32, sum of the weights.
        D: Head dim.
        SPLITS: Programs that share a lane.
    """
    # An empty split has mass 0; a NaN mass stays NaN.
    some = tl.where(mass == 0, 1.0, mass)
    lse = tl.where(mass == 0, float("-inf"), top + tl.log2(some))
    # Computed after the loop, to save registers inside it.
    part = (token * heads + head) * SPLITS + tl.program_id(2)
    tl.store(lse_at + part, lse, mask=asked)
    seen = asked & (mass != 0)
    target = out_at + part[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(target, acc / some[:, None], mask=seen[:, None])


@triton.jit
def merge_kernel(
    out_at: tl.tensor,
    lse_at: tl.tensor,
    result_at: tl.tensor,
    total_at: tl.tensor,
    COUNTED: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Merge the splits of one token and query head by log-sum-exp; grid (T, Hq).

    If COUNTED, ``total_at`` points to the number of valid tokens; later tokens get
    zeros, and so do tokens with empty splits only. A NaN mass makes the result NaN.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, D)
    lane = token.to(tl.int64) * heads + head
    part = lane * SPLITS + split
    if COUNTED:
        ours = split * 0 + token < tl.load(total_at).to(tl.int32)
        lse = tl.load(lse_at + part, mask=ours, other=float("-inf"))
    else:
        lse = tl.load(lse_at + part)
    some = lse != float("-inf")
    source = out_at + part[:, None] * D + dim[None, :]
    out = tl.load(source, mask=some[:, None], other=0.0)
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    mass = tl.sum(weight, 0)
    # An empty split contributes 0, even if its output is undefined.
    share = tl.where(weight[:, None] == 0, 0.0, out * weight[:, None])
    result = tl.sum(share, 0) / tl.where(mass == 0, 1.0, mass)
    tl.store(result_at + lane * D + dim, result.to(result_at.dtype.element_ty))


def room(
    tokens: int, heads: int, splits: int, dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised ``out_at`` and ``lse_at``, see ``store_split``.

    Args:
        tokens: T.
        heads: Hq, query heads.
        splits: Programs that share a lane.
        dim: D.
        device: Device of the queries.
    """
    shape = (tokens, heads, splits)
    out = torch.empty(*shape, dim, dtype=torch.float32, device=device)
    return out, torch.empty(shape, dtype=torch.float32, device=device)


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    result: torch.Tensor,
    total: torch.Tensor | None = None,
) -> None:
    """Write the result of ``merge_splits_ref`` to ``result``.

    Args:
        out: As written by ``store_split``; T and Hq are at least 1.
        lse: As written by ``store_split``.
        result: [T, Hq, D], contiguous; overwritten.
        total: [1] int32 or int64 on the device, number of valid tokens; None: all.
    """
    tokens, heads, splits, dim = out.shape
    merge_kernel[(tokens, heads)](
        # Without a total the pointer is not dereferenced; any tensor will do.
        *(out, lse, result, lse if total is None else total),
        COUNTED=total is not None,
        D=dim,
        SPLITS=splits,
        num_warps=NUM_WARPS,
    )


def product_dtype(q: torch.Tensor) -> Any:
    """Return Triton's dtype of the products: that of ``q``.

    Triton's interpreter multiplies bfloat16 as the integers that store them, so there
    products of bfloat16 are computed in float32.
    """
    if q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and not q.is_cuda):
        return tl.float32
    return tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16
