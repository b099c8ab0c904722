"""Keep what the prompt's last tokens attend to (SnapKV, arXiv:2404.14469)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import SELECTORS, Needs, Seen, Selector
from vericache_sglang.errors import CompressionError

CHUNK_ELEMENTS = 4 * 2**20
"""Most attention weights computed at once, in elements (float32: 16 MiB a copy)."""


@SELECTORS.register("snapkv")
class SnapKV(Selector):
    """Mean attention of the last queries, smoothed, averaged over a KV head's group.

    The form of kvpress (``SnapKVPress``), whose group mean the official code lacks: it
    selects per query head, and so stores every KV head once per query head. Where we
    depart from it: tokens that fill no page are not offered, so they are missing from
    the softmax as well.

    Args:
        seed: Every factory gets one; nothing here is random.
        pooling: Width of the moving average over scores, in tokens, odd; 1 is off.

    Raises:
        CompressionError: ``pooling`` is even or below 1.
    """

    # kvpress' width; a question longer than the window loses what its start asks for.
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
        """See ``Selector.scores``; O(Hq * w * T * D), a few copies of 16 MiB at most.

        Tokens in the window, those of ``seen.tail``, score above every other token and
        ascending, so they are kept, the latest ones first where they do not all fit.

        Raises:
            CompressionError: ``seen.tail`` is None.
        """
        queries = seen.tail
        if queries is None:
            raise CompressionError("snapkv: the prompt's last queries are missing")
        heads, tokens, _ = keys.shape
        # A query head's group, and its window, become rows of one product.
        groups = queries.rows.view(heads, -1, *queries.rows.shape[1:])
        scores = torch.arange(2, 2 + tokens, dtype=torch.float32, device=keys.device)
        scores = scores.repeat(heads, 1)
        prefix = min(tokens, queries.start)
        if prefix <= 0:
            return scores
        for head in range(heads):
            received = _mean_attention(groups[head], keys[head], queries.start)
            # Pooling is linear: one pass over the group's mean, not one a query head.
            scores[head, :prefix] = functional.avg_pool1d(
                received[None, :prefix],
                self._pooling,
                stride=1,
                padding=self._pooling // 2,
            )[0]
        return scores


def _mean_attention(
    queries: torch.Tensor, keys: torch.Tensor, start: int
) -> torch.Tensor:
    """Average the attention that the keys of one head receive, in float32.

    Args:
        queries: [G, w', D] of the head's group; row i stands at ``start + i``.
        keys: [T, D] at positions 0 to T - 1.
        start: Position of the first row, in tokens.

    Returns:
        [T], in [0, 1].
    """
    width, tokens = queries.shape[1], keys.shape[0]
    rows = queries.reshape(-1, queries.shape[2]).to(torch.float32)
    rows = rows * queries.shape[2] ** -0.5
    window = torch.arange(start, start + width, device=keys.device)
    positions = window.repeat(queries.shape[0])
    transposed = keys.to(torch.float32).t()
    total = keys.new_zeros(tokens, dtype=torch.float32)
    chunk = max(1, CHUNK_ELEMENTS // tokens)
    for part, places in zip(rows.split(chunk), positions.split(chunk), strict=True):
        logits = part @ transposed
        # Only keys inside the window can be later than a query.
        inside = logits[:, start:]
        inside.masked_fill_(window[: inside.shape[1]] > places[:, None], -torch.inf)
        total += torch.softmax(logits, dim=1).sum(0)
    return total / len(rows)
