"""Requests of a workload, and their state in the simulated server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.scheduling.plan import Residency

if TYPE_CHECKING:
    from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """One request of a workload.

    Attributes:
        rid: Request id.
        arrival_s: Arrival time, in seconds, >= 0.
        prompt: Prompt tokens, >= 1.
        output: Tokens it emits, >= 1; the server knows it as the limit.
        accept: Probability that a draft is accepted if those before it are.
        group: Requests with the same group have the same prompt; "" for none.
    """

    rid: str
    arrival_s: float = 0.0
    prompt: int
    output: int
    accept: float
    group: str = ""


@dataclass(slots=True, eq=False)
class Running:
    """A request with KV in the server.

    Attributes:
        request: The request of the workload.
        luck: Random generator of acceptances, the same for every policy.
        proposal_luck: The same of an inner drafter's proposals.
        dropped: Slots of its residual KV once compressed.
        emitted: Tokens emitted, including those before a retraction.
        at_base: Tokens emitted before the last admission, prefilled with the prompt.
        split: Whether its prompt is compressed.
        residency: Where the residual KV is.
        drafts: Tokens drafted since the last verification.
        held: Device slots it holds, including those being copied to the host.
        stage: Counter of prefetches, by which outdated arrivals are ignored.
        arrived: Whether its current prefetch has arrived.
        swapped_s: Time of its swap out, in seconds.
        burst_s: Time of its last emission, in seconds.
    """

    request: SimulatedRequest
    luck: Random
    proposal_luck: Random
    dropped: int
    emitted: int = 0
    at_base: int = 0
    split: bool = False
    residency: Residency = Residency.DEVICE
    drafts: int = 0
    held: int = 0
    stage: int = 0
    arrived: bool = False
    swapped_s: float = 0.0
    burst_s: float = 0.0

    @property
    def rid(self) -> str:
        """Request id."""
        return self.request.rid

    @property
    def base(self) -> int:
        """Tokens prefilled on admission."""
        return self.request.prompt + self.at_base

    @property
    def tokens(self) -> int:
        """Tokens with full KV, wherever it is."""
        return self.request.prompt + self.emitted

    @property
    def draft_slots(self) -> int:
        """Slots of its draft block-table row: kept, decoded and drafted tokens."""
        return self.tokens - self.dropped + self.drafts

    @property
    def kept(self) -> int:
        """Slots of its draft KV once compressed, without decoded tokens."""
        return self.base - self.dropped

    @property
    def remaining(self) -> int:
        """Tokens it has still to emit."""
        return self.request.output - self.emitted

    def accepted(self, drafted: int) -> int:
        """Draw the accepted drafts from a truncated geometric distribution."""
        return _run(self.luck, self.request.accept, drafted)

    def agreed(self, proposed: int, accept: float) -> int:
        """Draw the accepted proposals, each of them with probability ``accept``."""
        return _run(self.proposal_luck, accept, proposed)


def _run(luck: Random, accept: float, most: int) -> int:
    for count in range(most):
        if luck.random() >= accept:
            return count
    return most
