"""Keep tokens at random: the baseline for every other method."""

from __future__ import annotations

from hashlib import blake2b
from typing import ClassVar

import torch

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import SELECTORS, Needs, Seen, Selector


@SELECTORS.register("random")
class RandomTokens(Selector):
    """Uniform scores, drawn independently per request, layer and head.

    Seed, request id and layer determine the scores on every machine. SGLang draws ids
    that a client does not set, so only requests with an explicit ``rid`` repeat.
    """

    needs: ClassVar[Needs] = Needs(keys=False)
    about: ClassVar[About] = About(paper="baseline, no paper", licence="ours")

    def scores(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: Seen,
    ) -> torch.Tensor:
        """See ``Selector.scores``; [0, 1), O(H * T) drawn on the CPU, reads no key."""
        words = f"{self.seed}\0{layer}\0{rid}".encode()
        # Python's own hash of a text differs from one process to the next.
        start = int.from_bytes(blake2b(words, digest_size=8).digest(), "big")
        generator = torch.Generator().manual_seed(start)
        return torch.rand(keys.shape[:2], generator=generator).to(keys.device)
