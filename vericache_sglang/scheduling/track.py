"""What the runtime remembers of one request between plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vericache_sglang.scheduling.plan import (
    Draft,
    Plain,
    Residency,
    Shape,
    Verify,
    Wait,
)

if TYPE_CHECKING:
    from vericache_sglang.scheduling.acceptance import Acceptance
    from vericache_sglang.scheduling.draft_length import Patience
    from vericache_sglang.scheduling.reservation import PrefetchDemand
    from vericache_sglang.scheduling.share import Share


@dataclass(slots=True, eq=False)
class Track:
    """One running request.

    Attributes:
        shape: As it arrived.
        acceptance: What its verifications have shown.
        patience: When a request decoded plainly is looked at again.
        remaining: Tokens it may still emit.
        emitted: Tokens emitted since it arrived here.
        residency: Where its complement is.
        split: Two parts exist and the request drafts; else its whole KV is one row.
        group: Requests with the same group have the same complement.
        drafts: Tokens drafted since the last verification.
        most: Drafts at which this round waits for its verification; -1 while the
            request may not draft at all.
        length: Draft length chosen for this round, x.
        priced_at: Iteration in which ``length`` was chosen; -1 for not yet.
        priced_p: Acceptance it was chosen for.
        prefetch: What a round takes of the rings, with the iteration's and the link's
            time it was computed for.
        share: Part of an iteration, as priced last; None where that is out of date.
        unreported: The last verification was launched and its outcome is not known.
        held_up: Its next round begins when it is.
        closed: A stop token was drafted; drafting beyond it is wasted.
        staged: A reload was started, or has arrived, and is not used up.
        ready: The complement is staged.
        waited: Iterations left out of the forward in a row.
        failures: Reloads failed in a row.
        moved_at: Iteration of the last change of residency.
        emitted_at: Last iteration that emitted tokens.
        swapped_at: Iteration at which it was parked.
        settled_at: Iteration from which its prompt may be split.
        look_at: Iteration from which splitting it is considered (again).
    """

    shape: Shape
    acceptance: Acceptance
    patience: Patience
    remaining: int
    emitted: int = 0
    residency: Residency = Residency.DEVICE
    split: bool = False
    group: str = ""
    drafts: int = 0
    most: int = -1
    length: int = 1
    priced_at: int = -1
    priced_p: float = 0.0
    prefetch: tuple[float, float, PrefetchDemand] | None = None
    share: Share | None = None
    unreported: bool = False
    held_up: bool = False
    closed: bool = False
    staged: bool = False
    ready: bool = False
    waited: int = 0
    failures: int = 0
    moved_at: int = -(1 << 30)
    emitted_at: int = 0
    swapped_at: int = 0
    settled_at: int = 0
    look_at: int = 0
    rid: str = field(init=False)
    plain: Plain = field(init=False)
    draft: Draft = field(init=False)
    verify: Verify = field(init=False)
    wait: Wait = field(init=False)

    def __post_init__(self) -> None:
        # Made once: a plan names every request, and records are immutable.
        self.rid = rid = self.shape.rid
        self.plain, self.draft = Plain(rid), Draft(rid)
        self.verify, self.wait = Verify(rid), Wait(rid)

    @property
    def tokens(self) -> int:
        """Tokens whose exact KV exists."""
        return self.shape.prompt + self.emitted

    @property
    def slots(self) -> int:
        """Device slots of its rows: all of it, or what is left without the complement.

        Copies of a draft part beside a whole prompt are counted.
        """
        if not self.split:
            return self.tokens
        if self.residency is Residency.DEVICE:
            return self.tokens + self.shape.copies
        return self.tokens - self.shape.dropped

    def cap(self, draft_length: int) -> int:
        """Most drafts worth having now: a verification of d emits up to d + 1."""
        if self.closed:
            return self.drafts
        return max(0, min(draft_length, self.shape.longest, self.remaining - 1))
