"""Continues texts with what followed their last tokens before: prompt lookup.

Texts and results stay on the device. Shapes are fixed and nothing is read on the host.
"""

from __future__ import annotations

import torch

from vericache_kernels.suffix_match.ref import match_rows
from vericache_kernels.suffix_match.rows import LONGEST, NONE, Corpus, TextRows

__all__ = ["LONGEST", "NONE", "Corpus", "TextRows", "bytes_read", "suffix_match"]

TOKEN_BYTES = 4


def suffix_match(rows: TextRows, corpus: Corpus, depth: int) -> torch.Tensor:
    """Return the tokens that followed the best earlier match of each text's end.

    A match is a run of 1 to ``LONGEST`` equal tokens, which ends before the text's last
    token or anywhere in the corpus. The longest match wins, then the text's own over
    the corpus's, then the most recent. A continuation that reaches the end of its own
    text goes on with itself, as the text then repeats; one in the corpus ends with its
    document.

    Args:
        rows: The texts; all tensors are on one device.
        corpus: Documents searched for rows with ``rows.shared``.
        depth: Tokens wanted per row, >= 1.

    Returns:
        [n, depth] int64, ``NONE`` where nothing follows.

    Raises:
        ValueError: Shapes, dtypes, strides or devices do not fit, or ``depth`` < 1.
    """
    check(rows, corpus, depth)
    if rows.text.device.type == "cpu":
        return match_rows(rows, corpus, depth)
    from vericache_kernels.suffix_match.triton_impl import launch

    return launch(rows, corpus, depth)


def bytes_read(lengths: list[int], corpus: int) -> int:
    """Return a lower bound on the bytes that one call reads.

    Args:
        lengths: Tokens of each text.
        corpus: Tokens of the corpus, read once per text.
    """
    return TOKEN_BYTES * (sum(lengths) + len(lengths) * corpus)


def check(rows: TextRows, corpus: Corpus, depth: int) -> None:
    """Validate shapes, dtypes, strides and devices; does not read tensor contents.

    Raises:
        ValueError: See ``suffix_match``.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    count = len(rows.pool_idx)
    wanted = {
        "rows.text": (rows.text, 2, None, torch.int32),
        "rows.pool_idx": (rows.pool_idx, 1, None, torch.int64),
        "rows.length": (rows.length, 1, count, torch.int64),
        "rows.shared": (rows.shared, 1, count, torch.int64),
        "corpus.tokens": (corpus.tokens, 1, None, torch.int32),
        "corpus.end": (corpus.end, 1, 1, torch.int64),
    }
    for name, (tensor, dims, length, dtype) in wanted.items():
        if tensor.dim() != dims or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must have {dims} dimensions, contiguous, is "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )
        if length is not None and len(tensor) != length:
            raise ValueError(f"{name} must have {length} entries, has {len(tensor)}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, is {tensor.dtype}")
        if tensor.device != rows.text.device:
            raise ValueError(f"{name} is on {tensor.device}, not {rows.text.device}")
