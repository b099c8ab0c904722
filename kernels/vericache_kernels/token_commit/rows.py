"""Records of ``token_commit``: the draft token buffer and a forward's rows over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DRAFT = 0
"""Kind of a row that drafts."""
EMIT = 1
"""Kind of a row that emits: a verification, or an autoregressive row (no drafts)."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokens:
    """Pending and drafted tokens by ``req_pool_idx``, and how many there are.

    Attributes:
        tokens: [R, m + 1] int64, contiguous, where a row has at most m queries: column
            0 is the pending token (verified, its KV not written yet), columns 1 to d
            are the d drafts. Later columns hold proposals or former tokens.
        drafted: [R] int32, contiguous: d.
        verified: [R] int64, contiguous: tokens of the text before the pending one.
    """

    tokens: torch.Tensor
    drafted: torch.Tensor
    verified: torch.Tensor

    @property
    def most(self) -> int:
        """Maximum query tokens of a row, and tokens it can emit: m."""
        return self.tokens.shape[1] - 1


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokenRows:
    """B rows of a forward; vectors are int32 or int64.

    Attributes:
        pool_idx: [B], row of ``DraftTokens``, unique among rows with queries; ignored
            for rows without queries.
        first: [B + 1], ascending; row r has the queries ``first[r]`` to
            ``first[r + 1]``, at most m; a padding row has none.
        kind: [B], ``DRAFT`` or ``EMIT``.
    """

    pool_idx: torch.Tensor
    first: torch.Tensor
    kind: torch.Tensor

    def vectors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        names = ("pool_idx", "first", "kind")
        return {f"rows.{name}": getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, eq=False)
class Emission:
    """Tokens that the rows of a forward emitted or drafted.

    Attributes:
        tokens: [B, m] int64, padded with -1.
        counts: [B] int32, number of emitted tokens; 0 for draft rows and rows without
            queries.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
