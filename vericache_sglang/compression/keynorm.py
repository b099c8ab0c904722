"""Keep the keys of smallest norm (Devoto et al., EMNLP 2024, arXiv:2406.11430)."""

from __future__ import annotations

import torch

from vericache_sglang.compression.base import SELECTORS, QueryTail, Selector


@SELECTORS.register("keynorm")
class KeyNorm(Selector):
    """Small keys attract attention in most heads, so the score is minus the norm.

    RoPE is a rotation: the norm is the same before and after it.
    """

    def scores(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        queries: QueryTail | None,
    ) -> torch.Tensor:
        """See ``Selector.scores``; one pass over the keys."""
        norms: torch.Tensor = torch.linalg.vector_norm(
            keys, dim=-1, dtype=torch.float32
        )
        return -norms
