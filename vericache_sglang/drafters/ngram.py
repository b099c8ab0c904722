"""Prompt lookup: what followed the end of the text the last time it occurred."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_kernels.suffix_match import NONE, Corpus, TextRows, suffix_match
from vericache_sglang.device.upload import upload
from vericache_sglang.drafters.base import Drafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.drafters.base import Wanted
    from vericache_sglang.drafters.texts import Texts


class NgramDrafter(Drafter):
    """Searches a request's own text, and a ring of what finished requests said.

    Args:
        texts: Texts of the running requests.
        corpus: Tokens of the ring; 0 searches own texts only.
    """

    def __init__(self, texts: Texts, corpus: int) -> None:
        self._texts = texts
        self._size, self._end = corpus, 0
        device = texts.tokens.device
        self._corpus = Corpus(
            torch.full([corpus], NONE, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )

    def propose(self, wanted: Wanted) -> torch.Tensor:
        """See ``Drafter.propose``."""
        rows = TextRows(
            self._texts.tokens, wanted.pool_idx, wanted.length, wanted.shared
        )
        return suffix_match(rows, self._corpus, wanted.depth)

    def finish(self, tokens: Sequence[int]) -> None:
        """See ``Drafter.finish``; replaces the oldest documents of the ring."""
        if not self._size:
            return
        document = [*tokens[max(0, len(tokens) - self._size + 1) :], NONE]
        places = [(self._end + i) % self._size for i in range(len(document))]
        self._end = (self._end + len(document)) % self._size
        place, token = upload(self._corpus.tokens.device, places, document)
        self._corpus.tokens[place] = token.to(torch.int32)
        self._corpus.end.fill_(self._end)
