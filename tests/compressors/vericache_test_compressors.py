"""A third party's package: compressors that return nonsense, for the tests."""

from __future__ import annotations

import torch

from vericache_sglang.compression.base import Selector


class RandomTokens(Selector):
    """Scores nobody could justify, other ones in every layer and head."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def scores(self, rid, layer, keys, values, seen):
        return torch.rand(keys.shape[:2], generator=self._generator)


class NotANumber(Selector):
    """Scores that are all NaN, of an unusual dtype."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def scores(self, rid, layer, keys, values, seen):
        return torch.full(keys.shape[:2], torch.nan, dtype=torch.float64)
