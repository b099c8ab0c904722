"""Triton kernel of ``token_commit``: one program per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vericache_kernels.token_commit.rows import EMIT, Emission

if TYPE_CHECKING:
    from vericache_kernels.token_commit.rows import DraftTokenRows, DraftTokens

EMITS = tl.constexpr(EMIT)
NUM_WARPS = 1


@triton.jit
def commit_kernel(
    tokens: tl.tensor,
    drafted: tl.tensor,
    verified: tl.tensor,
    pool_idx_at: tl.tensor,
    first: tl.tensor,
    kind_at: tl.tensor,
    target: tl.tensor,
    tokens_out: tl.tensor,
    counts_out: tl.tensor,
    MOST: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """Draft or accept in one row; grid (B,).

    MOST is m, PLACES is MOST rounded up to a power of two. ``tokens``, ``drafted`` and
    ``verified`` are those of ``DraftTokens``, the outputs those of ``Emission``.
    """
    row = tl.program_id(0)
    place = tl.arange(0, PLACES)
    start = tl.load(first + row).to(tl.int64)
    queries = tl.load(first + row + 1).to(tl.int64) - start
    emits = tl.load(kind_at + row) == EMITS
    live = queries > 0
    asked = (place < queries) & (place < MOST)
    chosen = tl.load(target + start + place, mask=asked, other=-1)
    pool_idx = tl.load(pool_idx_at + row, mask=live, other=0).to(tl.int64)
    own = tokens + pool_idx * (MOST + 1)
    base = tl.load(drafted + pool_idx, mask=live, other=0).to(tl.int64)
    base = tl.where(emits, 0, base)
    # The last query is never compared, so a first mismatch always exists.
    compared = (place < queries - 1) & (base + place < MOST) & (place < MOST - 1)
    draft = tl.load(own + base + 1 + place, mask=compared, other=0)
    run = tl.min(tl.where(compared & (draft == chosen), PLACES, place), 0)
    out = tokens_out + row.to(tl.int64) * MOST + place
    tl.store(out, tl.where(place <= run, chosen, -1), mask=place < MOST)
    count = tl.where(live & emits, run + 1, 0)
    tl.store(counts_out + row, count)
    column = tl.where(emits, 0, base + run + 1)
    token = tl.sum(tl.where(place == run, chosen, 0), 0)
    tl.store(own + column, token, mask=live & (column <= MOST))
    tl.store(drafted + pool_idx, tl.minimum(column, MOST), mask=live)
    before = tl.load(verified + pool_idx, mask=live & emits, other=0)
    tl.store(verified + pool_idx, before + count, mask=live & emits)


def launch(
    draft_tokens: DraftTokens, rows: DraftTokenRows, target: torch.Tensor
) -> Emission:
    """See ``token_commit``; the arguments are validated."""
    count, most = len(rows.pool_idx), draft_tokens.most
    tokens = target.new_empty(count, most)
    counts = torch.empty(count, dtype=torch.int32, device=target.device)
    if count:
        commit_kernel[(count,)](
            *(draft_tokens.tokens, draft_tokens.drafted, draft_tokens.verified),
            *(rows.pool_idx, rows.first, rows.kind, target),
            *(tokens, counts),
            MOST=most,
            PLACES=triton.next_power_of_2(most),
            num_warps=NUM_WARPS,
        )
    return Emission(tokens, counts)
