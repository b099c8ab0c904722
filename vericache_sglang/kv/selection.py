"""Selects the kept tokens of a prompt by the scores of a selector."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vericache_sglang.compression.budget import keep_indices
from vericache_sglang.errors import CompressionError
from vericache_sglang.kv.split_layers import INDICES
from vericache_sglang.kv.swapped import gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vericache_sglang.compression.base import Seen, Selector
    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.kv.handles import KVHandles

    Look = Callable[[int], Seen]
    """What was collected of a prompt, by layer."""


class PartRun(NamedTuple):
    """Consecutive parts of a prompt with the same number of kept tokens per head.

    Attributes:
        first: Position of the first token.
        parts: Number of parts.
        budget: Counts of each part; ``offered`` is its length.
    """

    first: int
    parts: int
    budget: Budget


class Chooser:
    """Scores prompts with a selector, layer by layer, and selects tokens.

    Nothing is read on the host: the selection stays on the device until it is
    copied.

    Args:
        selector: Bound to the model.
    """

    def __init__(self, selector: Selector, handles: KVHandles) -> None:
        self._selector = selector
        self._handles = handles

    def choose(
        self, rid: str, body: torch.Tensor, look: Look, runs: Sequence[PartRun]
    ) -> list[torch.Tensor]:
        """Select the kept tokens of every layer.

        Args:
            rid: Id of a request open in the selector.
            body: [B] int64, slots of the prompt's tokens, in order.
            look: Observations of the prompt, by layer.
            runs: Parts of the prompt, with their counts.

        Returns:
            For each run [L, H, parts, n] int32 on the pool's device, ascending, in
            [0, length of a part).

        Raises:
            CompressionError: A score is not [H, B].
        """
        chosen: list[list[torch.Tensor]] = [[] for _ in runs]
        for scores in self._by_layers(rid, body, look):
            layers, heads, _ = scores.shape
            for run, found in zip(runs, chosen, strict=True):
                first, parts, budget = run
                own = scores[..., first : first + parts * budget.offered]
                kept = keep_indices(own.reshape(-1, budget.offered), budget)
                shape = (layers, heads, parts, budget.kept)
                found.append(kept.to(torch.int32).view(shape))
        return [torch.cat(found) for found in chosen]

    def _by_layers(
        self, rid: str, body: torch.Tensor, look: Look
    ) -> Iterator[torch.Tensor]:
        """Yield scores [layers, H, B], for the layers that are ranked at once."""
        pool, heads = self._handles.pool, self._handles.geometry.kv_heads
        together = max(1, INDICES // (heads * len(body)))
        waiting: list[torch.Tensor] = []
        blocks = gathered(pool.k_buffer, pool.v_buffer, body)
        for layer, (keys, values) in enumerate(blocks):
            scores = self._selector.scores(
                rid, layer, keys.transpose(0, 1), values.transpose(0, 1), look(layer)
            )
            if scores.shape != (heads, len(body)):
                raise CompressionError(
                    f"scores must be [heads, {len(body)}], got {tuple(scores.shape)}"
                )
            waiting.append(scores)
            if len(waiting) == together:
                yield torch.stack(waiting)
                waiting = []
        if waiting:
            yield torch.stack(waiting)
