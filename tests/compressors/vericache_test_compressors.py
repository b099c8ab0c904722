"""A third party's package: compressors that return nonsense, for the tests."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vericache_sglang.compression.base import Needs, Selector
from vericache_sglang.compression.codecs.base import Codec
from vericache_sglang.compression.compressor import TRIAL


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


WAYS = {
    "raise": lambda: 1 / 0,
    "exit": lambda: sys.exit("theirs"),
    "nothing": lambda: None,
    "text": lambda: "nonsense",
    "nan": lambda: float("nan"),
    "shape": lambda: torch.ones(3),
}


class Faulty(Selector):
    """One that does one call wrongly, in one of ``WAYS``."""

    needs = Needs(q_stream=True)

    def __init__(self, seed: int, call: str = "scores", how: str = "raise") -> None:
        super().__init__(seed)
        setattr(self, call, lambda *given: WAYS[how]())

    def update(self, step):
        return torch.rand(2, step.queries.shape[1])

    def scores(self, rid, layer, keys, values, seen):
        return torch.rand(keys.shape[:2])


class FaultyShare(Faulty):
    """As ``Faulty``, of a method that says which share to keep.

    With a ``rank``, that one of several ranks alone is faulty.
    """

    def __init__(
        self, seed: int, call: str = "keep_share", how: str = "raise", rank: int = -1
    ) -> None:
        super().__init__(seed, call, how)
        wrong = getattr(self, call)

        def there(*given):
            here = dist.get_rank() if dist.is_initialized() else 0
            if rank in (-1, here):
                return wrong()
            return getattr(type(self), call)(self, *given)

        setattr(self, call, there)

    def keep_share(self, noted):
        return 0.3


@dataclass(frozen=True)
class Nonsense(Codec):
    """One byte of each token's keys and values, which decodes to NaN."""

    name = "test-nonsense"

    def draft_layout(self, part_shape):
        return {"nothing": (torch.uint8, (part_shape.heads, part_shape.tokens, 1))}

    def _encode_draft(self, source):
        keys = source.keys
        nothing = keys.new_zeros(*keys.shape[:2], 1, dtype=torch.uint8)
        return source.part_shape, {"nothing": nothing}

    def _decode(self, draft):
        part_shape = draft.part_shape
        shape = (part_shape.heads, part_shape.tokens)
        return tuple(
            torch.full((*shape, dim), torch.nan, dtype=part_shape.dtype)
            for dim in (part_shape.key_dim, part_shape.value_dim)
        )


@dataclass(frozen=True)
class FaultyCodec(Nonsense):
    """One that does one call wrongly, but not as it is tried at the start."""

    name = "test-faulty-codec"

    call: str = "encode_draft"
    how: str = "raise"

    def _encode_draft(self, source):
        tried = source.keys.shape[1] == TRIAL
        wrong = not tried and self.call == "encode_draft" and WAYS[self.how]()
        return wrong or super()._encode_draft(source)

    def _decode(self, draft):
        tried = draft.part_shape.tokens == TRIAL
        wrong = not tried and self.call == "decode" and WAYS[self.how]()
        return wrong or super()._decode(draft)
