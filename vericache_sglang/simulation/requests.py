"""What is asked of the simulated server, and each request's state while it runs."""

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
        arrival_s: When it arrives, in seconds, >= 0.
        prompt: Prompt tokens, >= 1.
        output: Tokens it emits, >= 1; known to the server as its limit.
        accept: Probability that a draft is right when those before it are.
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
        request: What was asked.
        luck: Decides which drafts are right; the same for every policy.
        base: Tokens that were in its prompt when it was let in: more than the request's
            own after it was retracted.
        dropped: Slots of its complement once split.
        emitted: Tokens emitted, over all its stays.
        at_base: Those of them that ``base`` counts.
        split: Two parts exist.
        residency: Where the complement is.
        drafts: Tokens drafted since the last verification.
        held: Device slots it holds, those on their way to the host included.
        stage: Counts reloads, so that a late arrival is told from a new one.
        arrived: Its current reload has arrived.
        swapped_s: When it was parked.
        burst_s: When it last emitted.
    """

    request: SimulatedRequest
    luck: Random
    base: int
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
    def tokens(self) -> int:
        """Tokens whose exact KV exists."""
        return self.base + self.emitted - self.at_base

    @property
    def draft_slots(self) -> int:
        """Slots of its draft row: kept ones, decoded ones, drafts so far."""
        return self.tokens - self.dropped + self.drafts

    @property
    def remaining(self) -> int:
        """Tokens it will still emit."""
        return self.request.output - self.emitted

    def accepted(self, drafted: int) -> int:
        """Draw how many of ``drafted`` drafts are right: a geometric run, cut off."""
        for count in range(drafted):
            if self.luck.random() >= self.request.accept:
                return count
        return drafted
