"""What a verification is given and what comes of it: the records of this op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """Whose noise each of N positions gets.

    Attributes:
        seeds: [N] int64, read as 64 bits without a sign; the request's.
        positions: [N] int32 or int64, true position of the last token before; its low
            32 bits count.
    """

    seeds: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """B rows after a forward; d is the most drafts a row can have.

    Vectors are int32 or int64 unless said otherwise.

    Attributes:
        first: [B], a row's first position in the forward.
        usable: [B], how many of its positions mean something, 0 to d + 1: one more than
            its drafts, fewer where a grammar ends. 0: nothing is asked.
        drafts: [B, d] int64, what was drafted; from ``usable`` - 1 on of no matter.
        pending: [B] int64, last verified token of the row.
        lengths: [B], committed tokens of the row.
    """

    first: torch.Tensor
    usable: torch.Tensor
    drafts: torch.Tensor
    pending: torch.Tensor
    lengths: torch.Tensor

    def vectors(self) -> dict[str, torch.Tensor]:
        """Return what has one number a row, by name."""
        names = ("first", "usable", "pending", "lengths")
        return {f"rows.{name}": getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """What comes of a verification.

    Attributes:
        tokens: [B, d + 1] int64, emitted tokens, 0 behind the last one.
        emitted: [B] int32, how many; one more than the accepted drafts, 0 where nothing
            was asked.
        pending: [B] int64, the last one emitted, or as before.
        lengths: [B] as given, longer by ``emitted``.
    """

    tokens: torch.Tensor
    emitted: torch.Tensor
    pending: torch.Tensor
    lengths: torch.Tensor
