"""The runtime's state of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from vericache_sglang.scheduling.acceptance import FIRST_DRAFTS
from vericache_sglang.scheduling.plan import (
    Draft,
    Plain,
    RequestSpec,
    Residency,
    Verify,
    Wait,
)
from vericache_sglang.scheduling.proposals import Proposals

if TYPE_CHECKING:
    from vericache_sglang.scheduling.acceptance import Acceptance
    from vericache_sglang.scheduling.draft_length import Patience
    from vericache_sglang.scheduling.reservation import PrefetchDemand
    from vericache_sglang.scheduling.share import Share


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One running request.

    Attributes:
        spec: Sizes and limits on arrival.
        acceptance: Its acceptance probability.
        patience: Back-off before an autoregressive request may speculate again.
        proposals: What an inner drafter may propose in its rows.
        remaining: Tokens it may still emit; everything that rows without a result
            could emit counts as emitted.
        residency: Where its residual KV is.
        split: Whether its prompt is compressed, so that it drafts; else its block-table
            row lists the full KV.
        group: Key of the residual KV it shares; "" if it is not shared.
        drafts: Tokens drafted since the last verification, at least.
        pending: Further tokens that draft rows without a result may have drafted.
        most: Draft count at which the cycle waits for its verification; -1 while the
            request may not draft.
        length: Draft length chosen for this cycle, x.
        priced_at: Iteration in which ``length`` was chosen; -1: none yet.
        priced_p: Acceptance probability for which ``length`` was chosen.
        prefetch: Iteration time and link time in seconds, and the demands on the rings
            computed from them.
        share: Last computed share of an iteration; None if it is out of date.
        closed: A stop token was drafted; drafts after it are useless.
        staged: It holds staging-buffer slots, or a share of them.
        ready: Its residual KV has arrived in the staging buffer.
        waited: Forwards skipped in a row.
        failures: Prefetches failed in a row.
        moved_at: Iteration of the last KV move.
        emitted_at: Last iteration that emitted tokens.
        settled_at: Iteration from which its prompt may be compressed.
        look_at: Iteration from which compressing it is considered (again).
    """

    spec: RequestSpec
    acceptance: Acceptance
    patience: Patience
    remaining: int = field(init=False)
    proposals: Proposals = field(default_factory=Proposals)
    residency: Residency = Residency.DEVICE
    split: bool = False
    group: str = ""
    drafts: int = 0
    pending: int = 0
    most: int = -1
    length: int = 1
    priced_at: int = -1
    priced_p: float = 0.0
    prefetch: tuple[float, float, PrefetchDemand] | None = None
    share: Share | None = None
    closed: bool = False
    staged: bool = False
    ready: bool = False
    waited: int = 0
    failures: int = 0
    moved_at: int = -(1 << 30)
    emitted_at: int = 0
    settled_at: int = 0
    look_at: int = 0
    rid: str = field(init=False)
    plain: Plain = field(init=False)
    draft: Draft = field(init=False)
    verify: Verify = field(init=False)
    wait: Wait = field(init=False)

    def __post_init__(self) -> None:
        # Created once: every plan lists every request, and the records are immutable.
        self.rid = rid = self.spec.rid
        self.remaining = self.spec.remaining
        self.plain, self.draft = Plain(rid), Draft(rid)
        self.verify, self.wait = Verify(rid), Wait(rid)

    @property
    def tokens(self) -> int:
        """Tokens with full KV, wherever it is."""
        return self.spec.prompt + self.spec.remaining - self.remaining

    @property
    def slots(self) -> int:
        """Device slots of its KV, without residual KV on the host.

        On the device the draft KV is beside the full KV.
        """
        if not self.split:
            return self.tokens
        if self.residency is Residency.DEVICE:
            return self.tokens + self.spec.kept
        return self.tokens - self.spec.dropped

    @property
    def staging_done(self) -> bool:
        """Whether its residual KV is on the device, or prefetched."""
        return self.residency is Residency.DEVICE or self.ready

    @property
    def load_slots(self) -> int:
        """Device slots that loading takes: the full KV goes beside the draft KV."""
        return self.spec.dropped + self.spec.kept

    def put_off(self, now: int) -> None:
        """Let ``patience.wait`` tokens pass before compressing it is considered again.

        Args:
            now: Current iteration.
        """
        self.look_at = now + ceil(self.patience.wait() / self.proposals.pace)

    def furthest(self, draft_length: int, proposals: int) -> int:
        """Return the most drafts that its rows may reach, whatever was accepted.

        Args:
            draft_length: Most drafts before proposals.
            proposals: Most proposals in a row; the last draft row may exceed
                ``draft_length`` by these.
        """
        return min(draft_length + proposals, self.remaining - 1)

    def cap(self, draft_length: int) -> int:
        """Most useful drafts: a verification of d drafts emits up to d + 1 tokens."""
        if self.closed:
            return self.drafts
        return max(0, min(draft_length, self.spec.longest, self.remaining - 1))

    def wanted(self, draft_length: int) -> int:
        """Drafts after which a cycle is verified if nothing delays it.

        First drafts are few only where verifying them needs no prefetch.
        """
        longest = min(self.length, self.cap(draft_length))
        if self.residency is Residency.DEVICE:
            return min(longest, self.acceptance.supported(FIRST_DRAFTS))
        return longest
