"""How many tokens an inner drafter proposes in a request's rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from vericache_sglang.scheduling.acceptance import Acceptance, Prior
from vericache_sglang.scheduling.draft_length import Patience

ENTER = 1.03
"""Predicted gain from which tokens are proposed: 1 plus a margin for the model."""

LEAVE = 1.02
"""Predicted gain below which no more are; the gap to ``ENTER`` is hysteresis. Above 1,
because a proposal that costs nothing never loses, and the estimated acceptance of a
drafter that is never right does not reach 0."""


@dataclass(frozen=True, slots=True)
class ProposalCost:
    """Time of a row and of its proposals.

    Attributes:
        row_s: The row without proposals, in seconds, >= 0.
        token_s: Each proposal in it, in seconds, >= 0.
        drafter_s: Asking the drafter for this row, in seconds, >= 0.
    """

    row_s: float
    token_s: float
    drafter_s: float = 0.0

    def of(self, count: int) -> float:
        """Return the seconds of a row with ``count`` proposals."""
        if not count:
            return self.row_s
        return self.row_s + count * self.token_s + self.drafter_s


def best_count(p: float, cost: ProposalCost, most: int) -> tuple[int, float]:
    """Return the number of proposals with the highest gain, and the gain.

    Proposal i is accepted with those before it, with probability p^i, and saves a row;
    it costs a query token whether accepted or not. The gain is the tokens per second
    of such rows over those of rows without proposals.

    Args:
        p: Probability that a proposal is accepted after accepted ones, in [0, 1].
        cost: Times of a row.
        most: Most proposals, >= 0.

    Returns:
        A number in [0, most], 0 with gain 1 if none pays.
    """
    if not cost.row_s > 0.0:
        return 0, 1.0
    best, rate = 0, 1.0 / cost.row_s
    power = tokens = 1.0
    for count in range(1, most + 1):
        power *= p
        tokens += power
        faster = tokens / cost.of(count)
        if faster > rate:
            best, rate = count, faster
    return best, rate * cost.row_s


@dataclass(slots=True, eq=False)
class Proposals:
    """The proposals in one request's rows.

    Attributes:
        acceptance: Probability that a proposal is accepted.
        most: Most proposals in a row.
        count: Proposals chosen for its rows.
        patience: Back-off before proposals are tried again.
        try_at: Iteration from which they are; unused while some are chosen.
    """

    acceptance: Acceptance = field(default_factory=lambda: Acceptance(Prior()))
    most: int = 0
    count: int = 0
    patience: Patience = field(default_factory=Patience)
    try_at: int = 0

    @property
    def pace(self) -> float:
        """Expected tokens of a row with the chosen proposals, >= 1."""
        return 1.0 + self.acceptance.expected(self.count)

    @property
    def supported(self) -> int:
        """Most proposals of a row: one, and more where proposals were accepted."""
        return min(self.most, self.acceptance.supported(1))

    def next(self, now: int) -> int:
        """Return the proposals of a row in iteration ``now``.

        What does not pay is tried now and then, in one row each time.
        """
        if self.count or not self.most or now < self.try_at:
            return self.count
        self.try_at = now + self.patience.wait()
        return self.supported

    def observe(self, proposed: int, accepted: int) -> None:
        """Count the proposals of one row.

        Accepted ones support more in the next row, which is tried at once: whether
        they pay may depend on their number.
        """
        self.acceptance.observe(proposed, accepted)
        if accepted and self.supported < self.most:
            self.try_at = 0

    def choose(self, cost: ProposalCost) -> None:
        """Choose how many proposals pay at present."""
        count, gain = best_count(self.acceptance.p, cost, self.supported)
        if gain < (LEAVE if self.count else ENTER):
            count = 0
        if count and not self.count:
            self.patience.reset()
        self.count = count
