"""What the tensor-parallel ranks of a server agree on before cached prefixes change."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

from vericache_sglang.prefix_cache.restore_costs import Prices

if TYPE_CHECKING:
    from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments
    from vericache_sglang.scheduling.estimates import Estimates

PRICED = 4 << 20
"""Bytes of a copy at whose rate moves are priced: a segment of a large model."""


class Ranks:
    """A single rank: it agrees with itself, and communicates nothing.

    Several ranks make the same calls in the same order. With equal answers their
    indices of segments stay equal, and so do the matches of all prompts.

    Args:
        estimates: Measured rates, the same on all ranks.

    Attributes:
        alone: There is one rank.
    """

    rank = 0
    alone = True

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates

    def now(self) -> float:
        """Return the time by which uses of segments are dated, in seconds."""
        return time.monotonic()

    def prices(self, stored: StoredSegments | None) -> Prices:
        """Return the costs of moves and prefills that follow from measurements."""
        iteration, link = self._estimates.iteration.coefficients, self._estimates.link
        return Prices(
            link_in_s_per_byte=1 / link.bytes_per_s(PRICED, "in"),
            link_out_s_per_byte=1 / link.bytes_per_s(PRICED, "out"),
            store_latency_s=0.0,
            store_s_per_byte=self.store_s_per_byte(stored),
            prefill_s_per_token=iteration.per_token_s,
            # With a causal mask, n tokens form n^2 / 2 query-key products.
            prefill_s_per_square=iteration.per_product_s / 2,
        )

    def store_s_per_byte(self, stored: StoredSegments | None) -> float:
        """Return the seconds per byte of a fetch from the store; ``inf``: no store."""
        return inf if stored is None else stored.s_per_byte

    def agree_on_room(self) -> None:
        """Limit host memory to what every rank has free now."""

    def every(self, value: int) -> list[int]:
        """Return the value of each rank, in rank order."""
        return [value]

    def fail(self) -> None:
        """Tell ranks that wait in ``every`` that this rank has failed."""
