"""Torch reference of ``token_commit``, without a loop over rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_kernels.token_commit.rows import EMIT, Emission

if TYPE_CHECKING:
    from vericache_kernels.token_commit.rows import DraftTokenRows, DraftTokens


def commit_rows(
    draft_tokens: DraftTokens, rows: DraftTokenRows, target: torch.Tensor
) -> Emission:
    """See ``token_commit``; any device, without synchronisation."""
    most = draft_tokens.most
    place = torch.arange(most, device=target.device)
    first = rows.first.long()
    queries = first.diff()
    asked = place < queries[:, None]
    live = asked[:, 0]
    pool_idx = torch.where(live, rows.pool_idx, 0).long()
    # Unused entries read position 0; a forward without queries has no positions.
    positions = torch.where(asked, first[:-1, None] + place, 0)
    padded = target if len(target) else target.new_zeros(1)
    chosen = torch.where(asked, padded[positions], -1)
    emits = live & (rows.kind == EMIT)
    base = torch.where(emits, 0, draft_tokens.drafted[pool_idx].long())
    # The last query is never compared: its token is the one after all others.
    column = base[:, None] + 1 + place[:-1]
    compared = (place[:-1] < queries[:, None] - 1) & (column <= most)
    own = draft_tokens.tokens[pool_idx[:, None], column.clamp(max=most)]
    run = (compared & (own == chosen[:, :-1])).long().cumprod(1).sum(1)
    last = chosen.gather(1, run[:, None])[:, 0]
    column = torch.where(emits, 0, base + run + 1)
    written = live & (column <= most)
    cell = pool_idx * (most + 1) + torch.where(written, column, 0)
    _put(draft_tokens.tokens, cell, last, written)
    drafted = column.clamp(max=most).to(torch.int32)
    _put(draft_tokens.drafted, pool_idx, drafted, live)
    counts = torch.where(emits, run + 1, 0)
    draft_tokens.verified.scatter_add_(0, pool_idx, counts)
    tokens = torch.where(place <= run[:, None], chosen, -1)
    return Emission(tokens, counts.to(torch.int32))


def _put(
    numbers: torch.Tensor, cell: torch.Tensor, new: torch.Tensor, written: torch.Tensor
) -> None:
    """Write ``new`` to ``cell`` of the flattened ``numbers`` where ``written``.

    Adds a difference, which is zero where nothing is written, so that a padding row may
    name the cell of another row. Integers wrap around, so the sum is exact.
    """
    flat = numbers.view(-1)
    change = torch.where(written, new - flat[cell], 0)
    flat.scatter_add_(0, cell, change)
