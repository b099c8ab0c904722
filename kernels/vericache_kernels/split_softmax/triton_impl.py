"""What both attention kernels do with their splits: dtype, storing, merging."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""Scores times this are exponents of 2."""
LEAST_LANES = 16
"""Fewest rows that the tensor cores multiply."""
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
    """Store what one split saw of M lanes; the split is the grid's last place.

    Args:
        out_at: [T, Hq, SPLITS, D] float32, not written where nothing was seen.
        lse_at: [T, Hq, SPLITS] float32, to base 2, -inf where nothing was seen.
        token: [M] int64.
        heads: Hq, query heads.
        head: [M], query head.
        asked: [M] bool, False: nothing is stored.
        acc: [M, D] float32, values weighted by ``2 ** (score - top)``.
        top: [M] float32, the largest score.
        mass: [M] float32, sum of the weights.
        D: Head dim.
        SPLITS: Programs that share a lane.
    """
    # Nothing seen has mass 0; a mass of NaN stays one.
    some = tl.where(mass == 0, 1.0, mass)
    lse = tl.where(mass == 0, float("-inf"), top + tl.log2(some))
    # Here and not in front of the loop: there it would take registers.
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
    """Weigh the splits of one token and query head by log-sum-exp; grid (T, Hq).

    Where COUNTED, ``total_at`` points to the number of tokens that count; the others
    get zeros, and so do those that saw nothing. A split with mass NaN makes it NaN.
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
    # Nothing weighs nothing, whatever stands there.
    share = tl.where(weight[:, None] == 0, 0.0, out * weight[:, None])
    result = tl.sum(share, 0) / tl.where(mass == 0, 1.0, mass)
    tl.store(result_at + lane * D + dim, result.to(result_at.dtype.element_ty))


def room(
    tokens: int, heads: int, splits: int, dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unwritten ``out_at`` and ``lse_at``, see ``store_split``.

    Args:
        tokens: T.
        heads: Hq, query heads.
        splits: Programs that share a lane.
        dim: D.
        device: Of the queries.
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
    """Write what ``merge_splits_ref`` returns.

    Args:
        out: As ``store_split`` leaves it; T and Hq are at least 1.
        lse: As ``store_split`` leaves it.
        result: [T, Hq, D], contiguous; overwritten.
        total: [1] int32 or int64 on the device, tokens that count; None: all.
    """
    tokens, heads, splits, dim = out.shape
    merge_kernel[(tokens, heads)](
        # Without a total the pointer is not followed; any tensor will do.
        *(out, lse, result, lse if total is None else total),
        COUNTED=total is not None,
        D=dim,
        SPLITS=splits,
        num_warps=NUM_WARPS,
    )


def product_dtype(q: torch.Tensor) -> Any:
    """Return Triton's dtype of the products: that of ``q``.

    The interpreter multiplies bfloat16 as the integers it stores them in, so there
    products of bfloat16 are taken in float32.
    """
    if q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and not q.is_cuda):
        return tl.float32
    return tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16
