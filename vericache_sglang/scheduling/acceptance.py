"""Per-request acceptance probability of drafts, estimated from verifications."""

from __future__ import annotations

from math import expm1, log

from vericache_sglang.errors import InvariantError

PRIOR_START = 0.95
"""Acceptance probability per token without evidence: the paper's acceptance rate stays
above 0.8 at 30 drafts (arXiv:2605.17613, section 4.3)."""

PRIOR_TRIALS = 16.0
"""Weight of ``PRIOR_START`` in the acceptance of all requests, in tokens: some requests
whose first drafts are all rejected end the drafting of those that follow."""

PRIOR_TOKENS = 4.0
"""Weight of the prior in a request's own estimate, in tokens."""

REST_TOKENS = 16.0
"""The same for the rest of its answer: proposals are accepted in stretches, and two
rows of eight accepted ones say little about what follows."""

CYCLE_KEEP = 1.0 - 1.0 / 8.0
"""Decay of a request's counts per draft-verify cycle: about the last 8 cycles count."""

PRIOR_KEEP = 1.0 - 1.0 / 64.0
"""Decay of the counts over all requests, per cycle and per request that arrives: about
the last 64 cycles count. Without drafts there is no new evidence: the old one loses its
weight until a request drafts again, about one in twenty if all are still rejected."""

FIRST_DRAFTS = 4
"""Least drafts of a request's first cycle. It drafts up to twice what a cycle of recent
requests had accepted, the next ones up to twice what its own cycles had. A request
whose drafts are all rejected loses little; one whose drafts are accepted after others'
were rejected has at most two or three more verifications."""


class Prior:
    """Acceptance probability over all requests, the prior of each request's estimate.

    Args:
        start: Acceptance probability per token without evidence, in [0, 1].
        trials: Weight of ``start``, in tokens, > 0.

    Raises:
        InvariantError: ``start`` is outside [0, 1].
    """

    def __init__(
        self, start: float = PRIOR_START, trials: float = PRIOR_TRIALS
    ) -> None:
        if not 0.0 <= start <= 1.0:
            raise InvariantError(f"acceptance cannot start at {start}")
        self._start, self._weight = start, trials
        self._accepted = self._trials = self._cycles = 0.0

    @property
    def p(self) -> float:
        """Acceptance probability per token, in [0, 1]."""
        accepted = self._accepted + self._start * self._weight
        return accepted / (self._trials + self._weight)

    @property
    def accepted_per_cycle(self) -> float:
        """Mean accepted drafts of recent cycles, and of one more without any."""
        return self._accepted / (self._cycles + 1.0)

    def observe(self, accepted: int, trials: int) -> None:
        """Count one draft-verify cycle of any request; see ``Acceptance.observe``."""
        self.age()
        self._accepted += accepted
        self._trials += trials
        self._cycles += 1.0

    def age(self) -> None:
        """Give earlier counts less weight: a request has arrived, or a cycle ended."""
        self._accepted *= PRIOR_KEEP
        self._trials *= PRIOR_KEEP
        self._cycles *= PRIOR_KEEP


class Acceptance:
    """One request's acceptance probability per token.

    The mean of a Beta distribution whose counts decay with every draft-verify cycle.
    Drafts after the first rejected one carry no information, so a cycle counts as
    ``accepted`` successes and at most one failure.

    Args:
        prior: Shared by all requests; its mean weighs ``PRIOR_TOKENS`` tokens here.
    """

    __slots__ = ("_accepted", "_prior", "_trials")

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self._accepted = 0.0
        self._trials = 0.0

    @property
    def p(self) -> float:
        """Acceptance probability per token, in [0, 1]."""
        return self._mean(self._trials)

    @property
    def rest_p(self) -> float:
        """Acceptance probability per token in the rest of the answer, in [0, 1]."""
        return self._mean(self._trials, REST_TOKENS)

    @property
    def lenient_p(self) -> float:
        """The same with one rejection less, in [0, 1].

        Of a request with few drafts one rejection says little, of one with many it
        changes little.
        """
        rejected = self._trials - self._accepted
        return self._mean(self._trials - min(1.0, rejected))

    def _mean(self, trials: float, weight: float = PRIOR_TOKENS) -> float:
        weighted = self._accepted + weight * self._prior.p
        return weighted / (trials + weight)

    def observe(self, drafted: int, accepted: int) -> None:
        """Count one verification.

        Args:
            drafted: Draft tokens verified; 0 changes nothing.
            accepted: Draft tokens accepted, without the bonus token.

        Raises:
            InvariantError: ``accepted`` is outside [0, drafted].
        """
        if not 0 <= accepted <= drafted:
            raise InvariantError(f"{accepted} of {drafted} drafts accepted")
        if not drafted:
            return
        trials = accepted + (accepted < drafted)
        self._accepted = CYCLE_KEEP * self._accepted + accepted
        self._trials = CYCLE_KEEP * self._trials + trials
        self._prior.observe(accepted, trials)

    def supported(self, least: int) -> int:
        """Return the most drafts of the next cycle for which there is evidence enough.

        Args:
            least: What it is without any, >= 1.
        """
        of_others = self._prior.accepted_per_cycle
        accepted = self._accepted if self._trials else of_others
        return max(least, int(2.0 * accepted))

    def expected(self, length: int) -> float:
        """Return the expected number of accepted drafts out of ``length`` >= 0."""
        return expected_accepted(self.p, length)


def expected_accepted(p: float, length: int) -> float:
    """Return p + p^2 + ... + p^length: draft i needs all before it accepted.

    Args:
        p: Acceptance probability per token; clamped to [0, 1].
        length: Drafts, >= 0.
    """
    if p <= 0.0:
        return 0.0
    if p >= 1.0:
        return float(length)
    # expm1 and not 1 - p**length, which loses all digits when p is close to 1.
    return p * -expm1(length * log(p)) / (1.0 - p)
