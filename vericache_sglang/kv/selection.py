"""Which tokens of a prompt stay: a selector's scores, turned into positions."""

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


class Stretch(NamedTuple):
    """Parts of a prompt, one behind the other, in which a head keeps as many tokens.

    Attributes:
        first: First token.
        parts: How many parts.
        budget: Counts of each; ``offered`` is its length.
    """

    first: int
    parts: int
    budget: Budget


class Chooser:
    """Has a selector score prompts, layer by layer, and chooses by the scores.

    Nothing is read on the host: what was chosen stays on the device until somebody
    copies it.

    Args:
        selector: Bound to the model.
        handles: The pool.
    """

    def __init__(self, selector: Selector, handles: KVHandles) -> None:
        self._selector = selector
        self._handles = handles

    def choose(
        self, rid: str, body: torch.Tensor, look: Look, stretches: Sequence[Stretch]
    ) -> list[torch.Tensor]:
        """Choose the kept tokens of every layer.

        Args:
            rid: Request id, open.
            body: [B] int64, slots of the prompt's tokens, in order.
            look: What was collected of it.
            stretches: Where how many are kept.

        Returns:
            Of each stretch [L, H, parts, n] int32 on the pool's device, ascending, in
            [0, length of a part).

        Raises:
            CompressionError: A score is not [H, B].
        """
        chosen: list[list[torch.Tensor]] = [[] for _ in stretches]
        for scores in self._by_layers(rid, body, look):
            layers, heads, _ = scores.shape
            for stretch, found in zip(stretches, chosen, strict=True):
                first, parts, budget = stretch
                own = scores[..., first : first + parts * budget.offered]
                kept = keep_indices(own.reshape(-1, budget.offered), budget)
                shape = (layers, heads, parts, budget.kept)
                found.append(kept.to(torch.int32).view(shape))
        return [torch.cat(found) for found in chosen]

    def _by_layers(
        self, rid: str, body: torch.Tensor, look: Look
    ) -> Iterator[torch.Tensor]:
        """Yield the scores [layers, H, B] of as many layers as are ranked at once."""
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
