"""Torch reference of ``suffix_match``, and what runs on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vericache_kernels.suffix_match.rows import LONGEST, NONE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vericache_kernels.suffix_match.rows import Corpus, TextRows


def match_rows(rows: TextRows, corpus: Corpus, depth: int) -> torch.Tensor:
    """See ``suffix_match``; reads the lengths on the host."""
    found = torch.full((len(rows.pool_idx), depth), NONE, dtype=torch.int64)
    # Oldest first: the ring as if it had been written from its beginning.
    shift = int(corpus.end)
    documents = torch.cat([corpus.tokens[shift:], corpus.tokens[:shift]])
    place = torch.arange(depth)
    for i, (pool_idx, length, shared) in enumerate(
        zip(
            rows.pool_idx.tolist(),
            rows.length.tolist(),
            rows.shared.tolist(),
            strict=True,
        )
    ):
        own = rows.text[pool_idx, :length]
        tail = own[-LONGEST:].tolist()[::-1]
        end, most = _best(own[:-1].numpy(), tail)
        if shared:
            other, longer = _best(documents.numpy(), tail)
            if longer > most:
                after = documents[other + 1 : other + 1 + depth]
                ended = (after == NONE).long().cumsum(0) > 0
                found[i, : len(after)] = torch.where(ended, NONE, after)
                continue
        if most:
            found[i] = own[end + 1 + place % (length - 1 - end)]
    return found


def _best(tokens: NDArray[np.int32], tail: list[int]) -> tuple[int, int]:
    """Return the place of the last token of the best match, and its length.

    Args:
        tokens: [T], searched.
        tail: Tokens to be matched, the last one first.
    """
    if not tail:
        return 0, 0
    # Few places end with the last token, and only these are looked at again.
    ends = np.flatnonzero(tokens == tail[0])
    best, length = 0, 0
    for length, token in enumerate(tail):
        if length:
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == token]
        if not len(ends):
            return best, length
        best = int(ends[-1])
    return best, length + 1
