"""Torch reference of the merge of splits."""

from __future__ import annotations

import torch


def merge_splits_ref(
    out: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype, total: int | None = None
) -> torch.Tensor:
    """Merge the splits of every token and query head by log-sum-exp.

    Args:
        out: [T, Hq, S, D] float32, weighted average of a split's values; undefined for
            an empty split.
        lse: [T, Hq, S] float32, logarithm to base 2 of the split's mass; -inf for an
            empty split. A NaN makes the result NaN.
        dtype: Dtype of the result.
        total: Number of valid tokens; later tokens get zeros. None: all are valid.

    Returns:
        [T, Hq, D]; zeros where all splits are empty.
    """
    if total is not None:
        ours = torch.arange(len(lse), device=lse.device) < total
        lse = lse.masked_fill(~ours[:, None, None], float("-inf"))
    top = lse.amax(-1, keepdim=True)
    weight = torch.exp2(lse - top.masked_fill(top == float("-inf"), 0.0))
    # An empty split contributes 0, even if its output is undefined.
    share = torch.where(weight[..., None] == 0, 0.0, out * weight[..., None])
    mass = weight.sum(-1)
    return (share.sum(-2) / mass.masked_fill(mass == 0, 1.0)[..., None]).to(dtype)
