"""Ends a forward on the device: stores drafts and accepts verified tokens.

Tokens stay in a draft token buffer that the next forward reads, so the host can launch
that forward before it knows what was drafted or accepted. Shapes are fixed and nothing
is read on the host, so the call can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from vericache_kernels.token_commit.ref import commit_rows
from vericache_kernels.token_commit.rows import (
    DRAFT,
    EMIT,
    DraftTokenRows,
    DraftTokens,
    Emission,
)

__all__ = [
    "DRAFT",
    "EMIT",
    "DraftTokenRows",
    "DraftTokens",
    "Emission",
    "bytes_moved",
    "token_commit",
]

TOKEN_BYTES = 8
COUNTS_BYTES = 4 + 8
"""Bytes of ``drafted`` and ``verified`` of one row."""


def token_commit(
    draft_tokens: DraftTokens, rows: DraftTokenRows, target: torch.Tensor
) -> Emission:
    """Store drafted tokens and accept matching drafts (paper section 4.1, step 3).

    A row with q queries compares the q - 1 columns behind its first one with
    ``target``: an emitting row from column 0, a draft row from the column of its last
    draft, ``draft_tokens.drafted``. Its tokens are the longest equal prefix and the
    token of ``target`` after it. An emitting row emits them: the last one becomes the
    pending token, ``verified`` grows by their number and ``drafted`` becomes 0. A draft
    row drafts them: what an inner drafter proposed behind its drafts is drafted as far
    as the model agrees, and ``drafted`` grows. A row without queries changes nothing.

    On a GPU this is one launch without bounds checks on ``pool_idx``. Drafts past the
    last column are dropped and a query past the maximum is not read.

    Args:
        draft_tokens: Written at ``rows.pool_idx``: one token each, ``drafted`` and
            ``verified``.
        rows: The rows; all tensors are on one device.
        target: [T] int64, contiguous, the token sampled at every query of the forward.

    Raises:
        ValueError: Shapes, dtypes, strides or devices do not fit.
    """
    check(draft_tokens, rows, target)
    if target.device.type == "cpu":
        return commit_rows(draft_tokens, rows, target)
    from vericache_kernels.token_commit.triton_impl import launch

    return launch(draft_tokens, rows, target)


def bytes_moved(
    draft_tokens: DraftTokens, rows: DraftTokenRows, target: torch.Tensor
) -> int:
    """Return a lower bound on the bytes that one call moves, for emitting rows.

    Args:
        draft_tokens: See ``token_commit``.
        rows: See ``token_commit``.
        target: See ``token_commit``.
    """
    count = len(rows.pool_idx)
    read = sum(vector.nbytes for vector in rows.vectors().values())
    # Every token but a row's last is compared with a draft; one cell is written, and
    # both counts are read and written.
    read += target.nbytes + max(0, len(target) - count) * TOKEN_BYTES
    written = count * (draft_tokens.most + 1) * TOKEN_BYTES
    return read + written + count * (4 + 2 * COUNTS_BYTES)


def check(
    draft_tokens: DraftTokens, rows: DraftTokenRows, target: torch.Tensor
) -> None:
    """Validate shapes, dtypes, strides and devices; does not read tensor contents.

    Raises:
        ValueError: See ``token_commit``.
    """
    if (
        draft_tokens.tokens.dim() != 2
        or min(draft_tokens.tokens.shape) < 1
        or draft_tokens.most < 1
    ):
        raise ValueError(
            "draft_tokens.tokens must be [R, x + 2], is "
            f"{tuple(draft_tokens.tokens.shape)}"
        )
    pool_indices, count = len(draft_tokens.tokens), len(rows.pool_idx)
    wide, whole = (torch.int64,), (torch.int32, torch.int64)
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "draft_tokens.tokens": (
            draft_tokens.tokens,
            tuple(draft_tokens.tokens.shape),
            wide,
        ),
        "draft_tokens.drafted": (draft_tokens.drafted, (pool_indices,), (torch.int32,)),
        "draft_tokens.verified": (draft_tokens.verified, (pool_indices,), wide),
        "target": (target, (target.numel(),), wide),
    }
    for name, vector in rows.vectors().items():
        length = count + (name == "rows.first")
        wanted[name] = (vector, (length,), whole)
    for name, (tensor, shape, dtypes) in wanted.items():
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be {list(shape)}, contiguous, is {list(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} must be one of {dtypes}, is {tensor.dtype}")
        if tensor.device != target.device:
            raise ValueError(f"{name} is on {tensor.device}, not on {target.device}")
