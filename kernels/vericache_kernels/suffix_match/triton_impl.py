"""Triton kernel of ``suffix_match``: one program per text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vericache_kernels.suffix_match.rows import LONGEST, NONE

if TYPE_CHECKING:
    from vericache_kernels.suffix_match.rows import Corpus, TextRows

MOST = tl.constexpr(LONGEST)
NOTHING = tl.constexpr(NONE)
BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def best_match(
    tokens: tl.tensor,
    count: tl.tensor,
    shift: tl.tensor,
    size: tl.tensor,
    text: tl.tensor,
    length: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the best match in a ring of tokens: length * 2**32 + place.

    Args:
        tokens: Pointer to the ring, or to a text, which is a ring with ``shift`` 0.
        count: Tokens that are searched.
        shift: Where the ring begins.
        size: Tokens of the ring, >= 1.
        text: Pointer to the text whose end is matched.
        length: Its tokens.
        BLOCK: Places compared at once.
    """
    best = tl.zeros((), dtype=tl.int64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        same = place < count
        run = tl.zeros((BLOCK,), dtype=tl.int64)
        for back in range(MOST):
            wanted = tl.load(text + length - 1 - back, mask=back < length, other=-2)
            inside = same & (place >= back)
            at = (place - back + shift) % size
            token = tl.load(tokens + at, mask=inside, other=-3)
            same = inside & (token == wanted)
            run += same.to(tl.int64)
        score = tl.where(run > 0, (run << 32) + place, 0)
        best = tl.maximum(best, tl.max(score, 0))
    return best


@triton.jit(do_not_specialize=["width", "size"])
def match_kernel(
    texts: tl.tensor,
    pool_idx_at: tl.tensor,
    length_at: tl.tensor,
    shared_at: tl.tensor,
    corpus: tl.tensor,
    end_at: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    size: tl.tensor,
    DEPTH: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Continue one text; grid (n,).

    ``width`` is W, ``size`` is C, DEPTH is ``depth`` and PLACES that rounded up to a
    power of two. The tensors are those of ``TextRows`` and ``Corpus``.
    """
    row = tl.program_id(0)
    pool_idx = tl.load(pool_idx_at + row)
    text = texts + pool_idx * width
    length = tl.load(length_at + row)
    own = best_match(text, length - 1, 0, tl.maximum(length, 1), text, length, BLOCK)
    searched = tl.where(tl.load(shared_at + row) > 0, size, 0).to(tl.int64)
    shift = tl.load(end_at)
    ring = tl.maximum(size, 1)
    other = best_match(corpus, searched, shift, ring, text, length, BLOCK)
    place = tl.arange(0, PLACES).to(tl.int64)
    end = own & 0xFFFFFFFF
    period = tl.maximum(length - 1 - end, 1)
    found = tl.where(own > 0, PLACES, 0)
    mine = tl.load(text + end + 1 + place % period, mask=place < found, other=NOTHING)
    behind = (other & 0xFFFFFFFF) + 1 + place
    theirs = tl.load(
        corpus + (behind + shift) % ring, mask=behind < searched, other=NOTHING
    )
    ended = tl.cumsum((theirs == NOTHING).to(tl.int32), 0) > 0
    theirs = tl.where(ended, NOTHING, theirs)
    chosen = tl.where((other >> 32) > (own >> 32), theirs, mine)
    tl.store(out + row.to(tl.int64) * DEPTH + place, chosen, mask=place < DEPTH)


def launch(rows: TextRows, corpus: Corpus, depth: int) -> torch.Tensor:
    """See ``suffix_match``; the arguments are validated."""
    count = len(rows.pool_idx)
    out = torch.empty(count, depth, dtype=torch.int64, device=rows.text.device)
    if count:
        match_kernel[(count,)](
            *(rows.text, rows.pool_idx, rows.length, rows.shared),
            *(corpus.tokens, corpus.end, out),
            *(rows.text.shape[1], len(corpus.tokens)),
            DEPTH=depth,
            PLACES=triton.next_power_of_2(depth),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return out
