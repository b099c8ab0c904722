"""The end of a forward on the device: drafts noted, verifications accepted.

Tokens of a request stay on a board that the next forward reads, so the host need not
know what was drafted or accepted before it launches that forward. Shapes are fixed and
nothing is read on the host, so the call can stand in a CUDA graph.
"""

from __future__ import annotations

import torch

from vericache_kernels.board_commit.ref import commit_rows
from vericache_kernels.board_commit.rows import (
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
    "board_commit",
    "bytes_moved",
]

TOKEN_BYTES = 8
COUNT_BYTES = 4


def board_commit(
    draft_tokens: DraftTokens, rows: DraftTokenRows, target: torch.Tensor
) -> Emission:
    """Note what was drafted, keep the drafts that hold (paper section 4.1, step 3).

    A draft row with d drafts puts the token of its first query into column d + 1. An
    emitting row with q queries emits the tokens of the longest run of its q - 1 drafts
    that equal ``target``, and the one after it; that one becomes its pending token and
    ``draft_tokens.emitted`` says how many there were. A row without queries changes
    nothing.

    On a GPU it is one launch that looks at no index: a seat outside the board is
    followed. A draft behind the last column is dropped, a query behind x + 1 not read.

    Args:
        draft_tokens: Written at the seats of ``rows``: one token each, and ``emitted``
            of emitting rows.
        rows: The rows; on the device of the board, like all tensors here.
        target: [T] int64, contiguous, the token chosen at every query of the forward.

    Raises:
        ValueError: Shapes, dtypes, strides or devices do not fit.
    """
    check(draft_tokens, rows, target)
    if target.device.type == "cpu":
        return commit_rows(draft_tokens, rows, target)
    from vericache_kernels.board_commit.triton_impl import launch

    return launch(draft_tokens, rows, target)


def bytes_moved(
    draft_tokens: DraftTokens, rows: DraftTokenRows, target: torch.Tensor
) -> int:
    """Return the least bytes one call moves, every query of an emitting row.

    Args:
        draft_tokens: See ``board_commit``.
        rows: See there.
        target: See there.
    """
    count = len(rows.pool_idx)
    read = sum(vector.nbytes for vector in rows.vectors().values())
    # Every token but a row's last is compared with a draft; one cell is written.
    read += target.nbytes + max(0, len(target) - count) * TOKEN_BYTES
    written = count * (draft_tokens.most + 1) * TOKEN_BYTES
    return read + written + 2 * count * COUNT_BYTES


def check(
    draft_tokens: DraftTokens, rows: DraftTokenRows, target: torch.Tensor
) -> None:
    """Refuse what the kernel would misread; looks at shapes only, never at contents.

    Raises:
        ValueError: See ``board_commit``.
    """
    if (
        draft_tokens.tokens.dim() != 2
        or min(draft_tokens.tokens.shape) < 1
        or draft_tokens.most < 1
    ):
        raise ValueError(
            f"board.tokens must be [R, x + 2], is {tuple(draft_tokens.tokens.shape)}"
        )
    pool_indices, count = len(draft_tokens.tokens), len(rows.pool_idx)
    wide, whole = (torch.int64,), (torch.int32, torch.int64)
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "board.tokens": (draft_tokens.tokens, tuple(draft_tokens.tokens.shape), wide),
        "board.emitted": (draft_tokens.emitted, (pool_indices,), (torch.int32,)),
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
