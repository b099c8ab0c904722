"""Keep the first tokens and the last ones (StreamingLLM, arXiv:2309.17453)."""

from __future__ import annotations

from typing import ClassVar

import torch

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import SELECTORS, Needs, Seen, Selector


@SELECTORS.register("recency")
class Recency(Selector):
    """Scores by position, later is higher; sinks are the protected first tokens."""

    needs: ClassVar[Needs] = Needs(keys=False)
    about: ClassVar[About] = About(
        paper="StreamingLLM, arXiv:2309.17453",
        licence="MIT (mit-han-lab/streaming-llm)",
    )

    def scores(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: Seen,
    ) -> torch.Tensor:
        """See ``Selector.scores``; O(T), reads no key."""
        heads, tokens, _ = keys.shape
        age = torch.arange(tokens, dtype=torch.float32, device=keys.device)
        return age.expand(heads, tokens)
