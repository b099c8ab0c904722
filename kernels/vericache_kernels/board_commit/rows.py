"""The board of tokens that stays on the device, and a forward's rows over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DRAFT = 0
"""Kind of a row that drafts one token."""
EMIT = 1
"""Kind of a row that emits: a verification, or plain decoding, which has no drafts."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokens:
    """What R seats know of their own text; x is the most drafts a seat can have.

    Attributes:
        tokens: [R, x + 2] int64, contiguous: column 0 the pending token (verified, its
            KV not written yet), columns 1 to d the seat's d drafts. What is behind
            them is of no matter.
        emitted: [R] int32, contiguous: tokens that the seat's last emitting row
            emitted.
    """

    tokens: torch.Tensor
    emitted: torch.Tensor

    @property
    def most(self) -> int:
        """Most query tokens a row can have, and tokens it can emit: x + 1."""
        return self.tokens.shape[1] - 1


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokenRows:
    """B rows of a forward; vectors are int32 or int64.

    Attributes:
        pool_idx: [B], row of the board, unique among the rows that have queries; where
            a row has none of no matter.
        first: [B + 1], ascending; row r has the queries ``first[r]`` to
            ``first[r + 1]``, x + 1 at most, none where it only fills up a batch.
        kind: [B], ``DRAFT`` or ``EMIT``.
        drafts: [B], drafts of the seat before the forward, 0 to x; read of draft rows.
    """

    pool_idx: torch.Tensor
    first: torch.Tensor
    kind: torch.Tensor
    drafts: torch.Tensor

    def vectors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        names = ("pool_idx", "first", "kind", "drafts")
        return {f"rows.{name}": getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, eq=False)
class Emission:
    """What the rows of a forward emitted.

    Attributes:
        tokens: [B, x + 1] int64, 0 behind the last one.
        counts: [B] int32, how many; 0 of draft rows and of rows without queries.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
