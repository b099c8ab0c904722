"""One position of a mixed forward whose next token is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from vericache_sglang.sampling.grammar import GrammarCursor
    from vericache_sglang.sampling.penalties import Penalties
    from vericache_sglang.sampling.profile import Profile


class SampledRequest(Protocol):
    """What sampling reads of a request.

    Attributes:
        req: SGLang's ``Req``.
        profile: How the next token follows from the logits.
        penalties: Of its output tokens; None where it has none.
        cursor: Its place in its grammar; None without one.
        outputs: Verified output tokens.
        drafts: Tokens drafted since the last verification.
        drafted_from: The distributions [V] they were drawn from, under rejection.
    """

    req: Any
    profile: Profile
    penalties: Penalties | None
    cursor: GrammarCursor | None
    outputs: list[int]
    drafts: list[int]
    drafted_from: list[torch.Tensor]

    @property
    def emitted(self) -> int:
        """Output tokens, those before a retraction included."""


R_co = TypeVar("R_co", bound=SampledRequest, covariant=True)


@dataclass(frozen=True, slots=True)
class Query(Generic[R_co]):
    """A position after verified text and, maybe, drafts.

    Attributes:
        batch_index: Index of the request in the schedule batch.
        state: The request.
        at: Row of the forward's logits.
        drafts: How many of the request's drafts come before the position.
    """

    batch_index: int
    state: R_co
    at: int
    drafts: int


@dataclass(frozen=True, slots=True)
class RowQueries(Generic[R_co]):
    """The positions of one request's row: 1, or d + 1 in a verification.

    Attributes:
        queries: In order; they share seat and state.
        verifies: The row verifies ``state.drafts``; else it asks for one token.
        emits: What it asks for goes to the client; a draft does not.
    """

    queries: tuple[Query[R_co], ...]
    verifies: bool
    emits: bool

    @property
    def batch_index(self) -> int:
        """Index of the request in the schedule batch."""
        return self.queries[0].batch_index

    @property
    def state(self) -> R_co:
        """The request."""
        return self.queries[0].state
