"""A third party's package: compressors that return nonsense, for the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vericache_sglang.compression.base import Selector
from vericache_sglang.compression.codecs.base import Codec


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


@dataclass(frozen=True)
class Nonsense(Codec):
    """One byte of each token's keys and values, which decodes to NaN."""

    name = "test-nonsense"

    def draft_layout(self, extent):
        return {"nothing": (torch.uint8, (extent.heads, extent.tokens, 1))}

    def _encode(self, source):
        nothing = torch.zeros(*source.keys.shape[:2], 1, dtype=torch.uint8)
        residual = {"keys": source.keys, "values": source.values}
        return source.extent, {"nothing": nothing}, residual

    def _decode(self, draft):
        extent = draft.extent
        shape = (extent.heads, extent.tokens)
        return tuple(
            torch.full((*shape, dim), torch.nan, dtype=extent.dtype)
            for dim in (extent.key_dim, extent.value_dim)
        )
