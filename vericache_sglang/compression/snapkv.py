"""Keep tokens that the prompt's last queries attend to (SnapKV, arXiv:2404.14469)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import SELECTORS, Needs, Seen, Selector
from vericache_sglang.compression.chunks import rows_at_once
from vericache_sglang.errors import CompressionError


@SELECTORS.register("snapkv")
class SnapKV(Selector):
    """Mean attention of the last queries, smoothed, averaged over a KV head's group.

    As in kvpress (``SnapKVPress``), with a mean over the group; the official code
    selects per query head, and so stores every KV head once per query head. Difference:
    tokens of the last, partial page are not offered, so the softmax lacks them too.

    Args:
        seed: Unused; the method is deterministic.
        pooling: Width of the moving average over scores, in tokens, odd; 1 is off.

    Raises:
        CompressionError: ``pooling`` is even or below 1.
    """

    # kvpress' width; the start of a question longer than this does not vote.
    needs: ClassVar[Needs] = Needs(q_tail=64)
    about: ClassVar[About] = About(
        paper="SnapKV, arXiv:2404.14469",
        scenarios=("long-context",),
        licence="Apache-2.0 (FasterDecoding/SnapKV; kvpress)",
    )

    def __init__(self, seed: int = 0, pooling: int = 5) -> None:
        super().__init__(seed)
        if pooling < 1 or pooling % 2 == 0:
            raise CompressionError(f"pooling must be odd and >= 1, got {pooling}")
        self._pooling = pooling

    def scores(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: Seen,
    ) -> torch.Tensor:
        """See ``Selector.scores``; O(Hq * w * T * D), in a few launches on a GPU.

        Tokens of the observation window (``seen.tail``) score above every other token
        and ascending, so they are kept; if they do not all fit, the latest ones are.

        Raises:
            CompressionError: ``seen.tail`` is None.
        """
        queries = seen.tail
        if queries is None:
            raise CompressionError("snapkv: the prompt's last queries are missing")
        heads, tokens, _ = keys.shape
        # The queries of a group's observation window become rows of one product.
        rows = queries.rows.reshape(heads, -1, queries.rows.shape[2])
        scores = torch.arange(2, 2 + tokens, dtype=torch.float32, device=keys.device)
        scores = scores.repeat(heads, 1)
        prefix = min(tokens, queries.start)
        if prefix <= 0:
            return scores
        received = _mean_attention(rows, keys, queries.rows.shape[1], queries.start)
        # Pooling is linear: pool the group's mean once, not each query head.
        scores[:, :prefix] = functional.avg_pool1d(
            received[:, :prefix], self._pooling, stride=1, padding=self._pooling // 2
        )
        return scores


def _mean_attention(
    rows: torch.Tensor, keys: torch.Tensor, width: int, start: int
) -> torch.Tensor:
    """Average the attention that keys receive from their group, in float32.

    Args:
        rows: [H, G * w', D], the queries of each KV head's group, one query head after
            the other; query i of each stands at ``start + i``.
        keys: [H, T, D] at positions 0 to T - 1.
        width: w'.
        start: Position of the first query, in tokens.

    Returns:
        [H, T], in [0, 1].
    """
    heads, tokens, dim = keys.shape
    rows = rows.to(torch.float32) * dim**-0.5
    transposed = keys.to(torch.float32).transpose(1, 2)
    turn = torch.arange(width, device=keys.device)
    # Only keys inside the observation window can be later than a query.
    later = (
        turn[: max(0, tokens - start)] > turn.repeat(rows.shape[1] // width)[:, None]
    )
    total = rows.new_zeros(heads, tokens)
    chunk = rows_at_once(heads * tokens, keys.device)
    for part, hidden in zip(rows.split(chunk, dim=1), later.split(chunk), strict=True):
        logits = part @ transposed
        logits[:, :, start:].masked_fill_(hidden, -torch.inf)
        total += torch.softmax(logits, dim=2).sum(1)
    return total / rows.shape[1]
