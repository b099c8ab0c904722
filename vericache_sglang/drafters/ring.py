"""Where the last tokens of a text lie in the KV of a small model or a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SINKS = 4
"""First tokens of a text that a small model's ring never replaces: its attention
collapses without them."""


@dataclass(frozen=True, slots=True)
class SlotRing:
    """The KV slots of one block-table row: pinned sinks, if any, then a ring.

    A token's *place* is its number among the tokens that the row has read, from 0. With
    capacity C and S sinks, place p >= S is slot S + p mod (C - S) of the row's slots,
    and the first S places are the first S slots, which lie in front of the ring.

    Attributes:
        window: Tokens that are attended to, sinks included, > ``sinks``.
        spare: Most places by which what was written may lie past the end of the text
            after a rollback, >= 0.
        sinks: S, >= 0.
    """

    window: int
    spare: int
    sinks: int = SINKS

    @property
    def capacity(self) -> int:
        """Slots of one row."""
        return self.window + self.spare

    def slots(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the slots of places.

        Args:
            rows: int64, broadcast against ``places``.
            places: int64, >= 0.

        Returns:
            int64, in [row * capacity, (row + 1) * capacity).
        """
        around = self.sinks + places % (self.capacity - self.sinks)
        return rows * self.capacity + torch.where(places < self.sinks, places, around)

    def listing(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return what block-table rows list: the sinks, then oldest to newest.

        Args:
            rows: [n] int64.
            ends: [n] int64, >= 1, tokens of each row.

        Returns:
            [n, window] int64 slots; the first ``min(end, window)`` count.
        """
        column = torch.arange(self.window, device=rows.device)
        dropped = (ends - self.window).clamp(min=0)
        places = column + (column >= self.sinks) * dropped[:, None]
        return self.slots(rows[:, None], places)
