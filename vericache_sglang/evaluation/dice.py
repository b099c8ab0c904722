"""Simulated acceptance: draft tokens are accepted, or proposed, at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_kernels.token_commit import EMIT, token_commit
from vericache_sglang.drafters.base import Drafter

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from vericache_kernels.token_commit import DraftTokenRows, DraftTokens, Emission
    from vericache_sglang.drafters.base import Wanted

NOTHING = -1
"""An invalid token id, equal to no draft token."""


def simulated_acceptance(
    acceptance: float, rng: random.Random
) -> Callable[[Sequence[int], Sequence[int]], list[int]]:
    """Return a replacement of ``accepted_tokens`` that accepts at random.

    Args:
        acceptance: Acceptance probability of a draft token after accepted ones.
        rng: Advanced by every draft token considered.
    """

    def accepted(drafts: Sequence[int], target: Sequence[int]) -> list[int]:
        most = min(len(drafts), len(target) - 1)
        run = 0
        while run < most and rng.random() < acceptance:
            run += 1
        return [*drafts[:run], target[run]]

    return accepted


def in_buffer(
    acceptance: float, seed: int
) -> Callable[[DraftTokens, DraftTokenRows, torch.Tensor], Emission]:
    """Return a replacement of ``token_commit`` that accepts at random.

    Args:
        acceptance: See ``simulated_acceptance``.
        seed: Seed of the generator, on the device of the draft token buffer.
    """
    dice: dict[torch.device, torch.Generator] = {}

    def commit(
        draft_tokens: DraftTokens, rows: DraftTokenRows, target: torch.Tensor
    ) -> Emission:
        device = target.device
        if device not in dice:
            dice[device] = torch.Generator(device).manual_seed(seed)
        first, pool_indices = rows.first.long(), rows.pool_idx.long()
        drafts = torch.where(rows.kind == EMIT, first.diff() - 1, 0)
        place = torch.arange(draft_tokens.most, device=device)
        drawn = torch.rand(
            len(drafts), draft_tokens.most, device=device, generator=dice[device]
        )
        lucky = (drawn < acceptance) & (place < drafts[:, None])
        run = lucky.long().cumprod(1).sum(1)
        # Pretend that the target emitted the accepted drafts, then another token.
        kept = place < run[:, None]
        cells = torch.where(kept, first[:-1, None] + place, 0)
        said = draft_tokens.tokens[pool_indices, 1:]
        change = torch.where(kept, said - target[cells], 0)
        target = target.scatter_add(0, cells.flatten(), change.flatten())
        column = torch.where(run < drafts, run + 1, 0)
        cell = pool_indices * draft_tokens.tokens.shape[1] + column
        flat = draft_tokens.tokens.view(-1)
        flat.scatter_add_(0, cell, torch.where(column > 0, NOTHING - flat[cell], 0))
        return token_commit(draft_tokens, rows, target)

    return commit


class RandomDrafter(Drafter):
    """An inner drafter that proposes random tokens.

    Args:
        tokens: Proposals are token ids below this number.
    """

    def __init__(self, tokens: int = 512) -> None:
        self._tokens = tokens

    def propose(self, wanted: Wanted) -> torch.Tensor:
        """See ``Drafter.propose``."""
        shape = len(wanted.pool_idx), wanted.depth
        return torch.randint(self._tokens, shape, device=wanted.pool_idx.device)
