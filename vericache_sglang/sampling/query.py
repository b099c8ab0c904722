"""Positions of a mixed forward at which a token is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from vericache_sglang.sampling.grammar import GrammarCursor
    from vericache_sglang.sampling.penalties import Penalties
    from vericache_sglang.sampling.profile import Profile


class SampledRequest(Protocol):
    """Attributes of a request that sampling reads.

    Attributes:
        req: SGLang's ``Req``.
        profile: Sampling profile.
        penalties: Penalties over its output tokens; None without penalties.
        cursor: Grammar cursor; None without a grammar.
        outputs: Verified output tokens.
        drafts: Tokens drafted since the last verification.
        drafted_from: Distributions [V] of the drafts, under rejection sampling.
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
        """Number of output tokens, including those before a retraction."""


R_co = TypeVar("R_co", bound=SampledRequest, covariant=True)


@dataclass(frozen=True, slots=True)
class Query(Generic[R_co]):
    """A position after the verified text and any drafts.

    Attributes:
        batch_index: Index of the request in the schedule batch.
        at: Row of the forward's logits.
        drafts: Number of drafts and proposals of its request before the position.
    """

    batch_index: int
    state: R_co
    at: int
    drafts: int


@dataclass(frozen=True, slots=True)
class RowQueries(Generic[R_co]):
    """The positions of one request's row: one, those of its drafts, and of proposals.

    Attributes:
        queries: Queries in order, with the same ``batch_index`` and ``state``.
        verifies: The row verifies ``state.drafts``.
        emits: The sampled tokens are emitted; False for a draft.
        proposed: Tokens behind the drafts, where sampling depends on them.
    """

    queries: tuple[Query[R_co], ...]
    verifies: bool
    emits: bool
    proposed: tuple[int, ...] = ()

    @property
    def ahead(self) -> list[int]:
        """Drafts and proposals after the verified text, before its last position."""
        return [*self.state.drafts, *self.proposed]

    @property
    def batch_index(self) -> int:
        """Index of the request in the schedule batch."""
        return self.queries[0].batch_index

    @property
    def state(self) -> R_co:
        """The request."""
        return self.queries[0].state
