"""Records of ``token_commit``: the draft token buffer and a forward's rows over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DRAFT = 0
"""Kind of a row that drafts one token."""
EMIT = 1
"""Kind of a row that emits: a verification, or an autoregressive row (no drafts)."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokens:
    """Pending and drafted tokens by ``req_pool_idx``; x is the maximum draft length.

    Attributes:
        tokens: [R, x + 2] int64, contiguous: column 0 is the pending token (verified,
            its KV not written yet), columns 1 to d are the d drafts; later columns are
            undefined.
        emitted: [R] int32, contiguous: number of tokens emitted by the request's last
            emitting row.
    """

    tokens: torch.Tensor
    emitted: torch.Tensor

    @property
    def most(self) -> int:
        """Maximum query tokens of a row, and tokens it can emit: x + 1."""
        return self.tokens.shape[1] - 1


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokenRows:
    """B rows of a forward; vectors are int32 or int64.

    Attributes:
        pool_idx: [B], row of ``DraftTokens``, unique among rows with queries; ignored
            for rows without queries.
        first: [B + 1], ascending; row r has the queries ``first[r]`` to
            ``first[r + 1]``, at most x + 1; a padding row has none.
        kind: [B], ``DRAFT`` or ``EMIT``.
        drafts: [B], drafts before the forward, 0 to x; read for draft rows only.
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
    """Tokens emitted by the rows of a forward.

    Attributes:
        tokens: [B, x + 1] int64, padded with 0.
        counts: [B] int32, number of tokens; 0 for draft rows and rows without queries.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
