"""What the tensor-parallel ranks of a server agree on before cached prefixes change."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments


class Ranks:
    """A single rank: it agrees with itself, and communicates nothing.

    Several ranks make the same calls in the same order. With equal answers their
    indices of segments stay equal, and so do the matches of all prompts.

    Attributes:
        alone: There is one rank.
    """

    alone = True

    def now(self) -> float:
        """Return the time by which uses of segments are dated, in seconds."""
        return time.monotonic()

    def s_per_byte(self, stored: StoredSegments | None) -> float:
        """Return the seconds per byte of a fetch from the store; ``inf``: no store."""
        return float("inf") if stored is None else stored.s_per_byte

    def agree_on_room(self) -> None:
        """Limit host memory to what every rank has free now."""

    def every(self, value: int) -> list[int]:
        """Return the value of each rank, in rank order."""
        return [value]

    def fail(self) -> None:
        """Tell ranks that wait in ``every`` that this rank has failed."""
