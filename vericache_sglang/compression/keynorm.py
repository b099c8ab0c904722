"""Keep the keys of smallest norm (Devoto et al., EMNLP 2024, arXiv:2406.11430)."""

from __future__ import annotations

from typing import ClassVar

import torch

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import SELECTORS, Seen, Selector


@SELECTORS.register("keynorm")
class KeyNorm(Selector):
    """Negative key norm: keys of small norm attract attention in most heads.

    RoPE is a rotation: the norm is the same before and after it.
    """

    about: ClassVar[About] = About(
        paper="L2 norm, arXiv:2406.11430, EMNLP 2024", licence="paper only"
    )

    def scores(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: Seen,
    ) -> torch.Tensor:
        """See ``Selector.scores``; one pass over the keys."""
        norms: torch.Tensor = torch.linalg.vector_norm(
            keys, dim=-1, dtype=torch.float32
        )
        return -norms
