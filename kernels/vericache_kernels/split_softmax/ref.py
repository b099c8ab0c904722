"""Merging splits in torch."""

from __future__ import annotations

import torch


def merge_splits_ref(
    out: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype, total: int | None = None
) -> torch.Tensor:
    """Weigh the splits of every token and query head by log-sum-exp.

    Args:
        out: [T, Hq, S, D] float32, average of the values a split saw; of no matter
            where it saw nothing.
        lse: [T, Hq, S] float32, logarithm to base 2 of the split's mass; -inf where it
            saw nothing. A NaN makes the result NaN.
        dtype: Of the result.
        total: Tokens that count; the others get zeros. None: all.

    Returns:
        [T, Hq, D]; zeros where no split saw anything.
    """
    if total is not None:
        ours = torch.arange(len(lse), device=lse.device) < total
        lse = lse.masked_fill(~ours[:, None, None], float("-inf"))
    top = lse.amax(-1, keepdim=True)
    weight = torch.exp2(lse - top.masked_fill(top == float("-inf"), 0.0))
    # Nothing weighs nothing, whatever stands there.
    share = torch.where(weight[..., None] == 0, 0.0, out * weight[..., None])
    mass = weight.sum(-1)
    return (share.sum(-2) / mass.masked_fill(mass == 0, 1.0)[..., None]).to(dtype)
