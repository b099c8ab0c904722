"""The end of a verification on the device: next tokens, which drafts hold, lengths.

``next_tokens`` chooses the token at every position of a forward; ``accept_commit``
compares them with the drafts of each row and says what is emitted, what comes next and
how long the row is now. Shapes are fixed and nothing is read on the host, so both can
stand in a CUDA graph.
"""

from __future__ import annotations

import torch

from vericache_kernels.accept_commit.ref import best_tokens, commit_rows
from vericache_kernels.accept_commit.rows import Commit, Noise, Verified

__all__ = [
    "Commit",
    "Noise",
    "Verified",
    "accept_commit",
    "bytes_moved",
    "next_tokens",
    "scores_bytes",
]

SCORES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of scores."""
TOKEN_BYTES = 8


def next_tokens(scores: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
    """Return the best token of every position, of equal ones the first.

    With noise a token is drawn: the noise is Gumbel's, from a hash of seed, position
    and column, so a position draws the same token in a draft and in its verification.
    It is the noise of SGLang's ``multinomial_with_seed`` (srt/layers/sampler.py,
    0.5.21): the hashes are equal to the bit; their logarithms and the sums are float64
    and may differ in the last place from one library to another.

    Args:
        scores: [N, V] bfloat16, float16 or float32, contiguous in V. With noise
            logarithms of probabilities; -inf is never chosen over a finite one. NaN
            counts as the greatest, as in ``torch.argmax``.
        noise: Whose noise; None: the argmax of the scores.

    Returns:
        [N] int64, in [0, V).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    if scores.dim() != 2 or scores.shape[1] < 1 or scores.stride(1) != 1:
        raise ValueError(
            f"scores must be [N, V], contiguous in V, are {tuple(scores.shape)} with "
            f"strides {scores.stride()}"
        )
    if scores.dtype not in SCORES:
        raise ValueError(f"scores are {scores.dtype}: one of {SCORES}")
    if noise is not None:
        _check_vectors(
            scores,
            len(scores),
            {"noise.seeds": noise.seeds, "noise.positions": noise.positions},
        )
        _check_wide("noise.seeds", noise.seeds)
    if scores.device.type == "cpu":
        return best_tokens(scores, noise)
    from vericache_kernels.accept_commit.triton_impl import launch_best

    return launch_best(scores, noise)


def accept_commit(tokens: torch.Tensor, rows: Verified) -> Commit:
    """Keep the drafts that equal the full KV's tokens (paper section 4.1, step 3).

    Row r asks at positions ``first[r]`` and following. It emits the tokens of the
    longest agreeing run of its drafts and the one after it, ``usable[r]`` at most. A
    row without drafts emits its one token; one with nothing usable stays as it is,
    which is how a batch is filled up to the size of its graph.

    Args:
        tokens: [N] int64, the full KV's token at every position.
        rows: The rows.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    if rows.drafts.dim() != 2 or not rows.drafts.is_contiguous():
        raise ValueError(
            f"drafts must be [B, d], contiguous, are {tuple(rows.drafts.shape)} with "
            f"strides {rows.drafts.stride()}"
        )
    _check_wide("tokens", tokens)
    _check_wide("drafts", rows.drafts)
    _check_wide("rows.pending", rows.pending)
    _check_vectors(tokens, len(tokens), {"tokens": tokens})
    _check_vectors(tokens, len(rows.drafts), rows.vectors())
    if tokens.device.type == "cpu":
        return commit_rows(tokens, rows)
    from vericache_kernels.accept_commit.triton_impl import launch_commit

    return launch_commit(tokens, rows)


def scores_bytes(scores: torch.Tensor, noise: Noise | None = None) -> int:
    """Return the least bytes ``next_tokens`` moves: scores once in, tokens out.

    Args:
        scores: See there.
        noise: See there.
    """
    vectors = 0
    if noise is not None:
        vectors = noise.seeds.nbytes + noise.positions.nbytes
    read = scores.numel() * scores.element_size()
    return read + vectors + len(scores) * TOKEN_BYTES


def bytes_moved(tokens: torch.Tensor, rows: Verified) -> int:
    """Return the least bytes ``accept_commit`` moves, every row full.

    Args:
        tokens: See there.
        rows: See there.
    """
    read = tokens.nbytes + rows.drafts.nbytes
    read += sum(vector.nbytes for vector in rows.vectors().values())
    count, most = rows.drafts.shape
    emitted = count * (most + 1) * TOKEN_BYTES
    return read + emitted + count * 4 + rows.pending.nbytes + rows.lengths.nbytes


def _check_vectors(
    like: torch.Tensor, count: int, vectors: dict[str, torch.Tensor]
) -> None:
    """Refuse what is not [count], whole numbers, contiguous and beside ``like``.

    Raises:
        ValueError: See ``accept_commit``.
    """
    for name, vector in vectors.items():
        if tuple(vector.shape) != (count,) or not vector.is_contiguous():
            raise ValueError(
                f"{name} must be [{count}], contiguous, is {tuple(vector.shape)}"
            )
        if vector.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, is {vector.dtype}")
        if vector.device != like.device:
            raise ValueError(f"{name} is on {vector.device}, not on {like.device}")


def _check_wide(name: str, numbers: torch.Tensor) -> None:
    """Refuse what is not int64.

    Raises:
        ValueError: See ``accept_commit``.
    """
    if numbers.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, is {numbers.dtype}")
