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
    place = torch.arange(draft_tokens.most, device=target.device)
    first = rows.first.long()
    queries = first.diff()
    asked = place < queries[:, None]
    live = asked[:, 0]
    pool_idx = torch.where(live, rows.pool_idx, 0).long()
    # Unused entries read position 0; a forward without queries has no positions.
    positions = torch.where(asked, first[:-1, None] + place, 0)
    padded = target if len(target) else target.new_zeros(1)
    chosen = torch.where(asked, padded[positions], 0)
    # The last query is never compared: its token is the one after all drafts.
    compared = place[:-1] < queries[:, None] - 1
    agree = compared & (draft_tokens.tokens[pool_idx, 1:-1] == chosen[:, :-1])
    run = agree.long().cumprod(1).sum(1)
    emits = live & (rows.kind == EMIT)
    counts = torch.where(emits, run + 1, 0)
    last = chosen.gather(1, run[:, None])[:, 0]
    column = torch.where(emits, 0, rows.drafts + 1).long()
    written = live & (column <= draft_tokens.most)
    token = torch.where(emits, last, chosen[:, 0])
    width = draft_tokens.tokens.shape[1]
    cell = pool_idx * width + torch.where(written, column, 0)
    _put(draft_tokens.tokens, cell, token, written)
    counts = counts.to(torch.int32)
    _put(draft_tokens.emitted, pool_idx, counts, emits)
    return Emission(torch.where(place < counts[:, None], chosen, 0), counts)


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
