"""One position of a mixed forward whose next token is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_sglang.engine.state import RequestState


@dataclass(frozen=True, slots=True)
class Query:
    """A position after verified text and, maybe, drafts.

    Attributes:
        seat: Index of the request in the schedule batch.
        state: The request.
        at: Row of the forward's logits.
        drafts: How many of the request's drafts come before the position.
    """

    seat: int
    state: RequestState
    at: int
    drafts: int


@dataclass(frozen=True, slots=True)
class RowQueries:
    """The positions of one request's row: 1, or d + 1 in a verification.

    Attributes:
        queries: In order; they share seat and state.
        verifies: The row verifies ``state.drafts``; else it asks for one token.
        emits: What it asks for goes to the client; a draft does not.
    """

    queries: tuple[Query, ...]
    verifies: bool
    emits: bool

    @property
    def seat(self) -> int:
        """Index of the request in the schedule batch."""
        return self.queries[0].seat

    @property
    def state(self) -> RequestState:
        """The request."""
        return self.queries[0].state
