"""All measured estimates that scheduling decisions use."""

from __future__ import annotations

from dataclasses import dataclass, field

from vericache_sglang.scheduling.acceptance import Prior
from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.iteration_model import Coefficients, IterationModel
from vericache_sglang.scheduling.link import LinkEstimate
from vericache_sglang.scheduling.recent_median import RecentMedian

START_LINK_BYTES_PER_S = 8e9
"""Initial link bandwidth, that of a modest PCIe link."""

PROPOSALS_START = 0.5
"""Initial acceptance probability of an inner drafter's proposals."""

PROPOSALS_TRIALS = 8.0
"""Its weight, in proposals: a drafter that is wrong on this work is found out soon."""

LEAST_PROMPT = 512
"""Shortest prompt whose prefill is measured, in tokens: warm-ups are short and slow."""

START_COEFFICIENTS = Coefficients(
    base_s=5e-3, per_token_s=1e-5, per_read_s=1e-8, per_product_s=1e-9
)
"""Initial coefficients of the iteration-time model."""


def proposal_prior() -> Prior:
    """Return the acceptance of proposals before the first one."""
    return Prior(PROPOSALS_START, PROPOSALS_TRIALS)


@dataclass(slots=True)
class Estimates:
    """Online estimates of the machine's speed and of the acceptance probability.

    All ranks must use the same values: one rank measures, all ranks plan.

    Attributes:
        iteration: Iteration time as a function of its work.
        link: Bandwidth between host and device.
        prior: Acceptance probability of requests without a verification.
        proposal_prior: Acceptance probability of an inner drafter's proposals in
            requests that had none.
        drafter_s: Time of a call of an inner drafter, in seconds. Most of it does not
            depend on the rows that it proposes for.
        split_s: Time to compress a prompt, in seconds per prompt token.
        prompt_s: Time to prefill what the prefix cache does not have of a prompt, in
            seconds per prompt token; 0: not measured.
    """

    iteration: IterationModel = field(
        default_factory=lambda: IterationModel(START_COEFFICIENTS)
    )
    link: LinkEstimate = field(
        default_factory=lambda: LinkEstimate(START_LINK_BYTES_PER_S)
    )
    prior: Prior = field(default_factory=Prior)
    proposal_prior: Prior = field(default_factory=proposal_prior)
    drafter_s: Ewma = field(default_factory=lambda: Ewma(0.0, least=0.0, most=1e-1))
    split_s: RecentMedian = field(default_factory=lambda: RecentMedian(1e-6, most=1e-2))
    prompt_s: Ewma = field(default_factory=lambda: Ewma(0.0, least=0.0, most=1.0))
    _chunks_s: float = field(default=0.0, init=False)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record a forward that prefills.

        Args:
            tokens: Of the prompts that it completes; less than ``LEAST_PROMPT`` say
                nothing of a prompt's tokens.
            seconds: That it took.
        """
        self._chunks_s += seconds
        if tokens >= LEAST_PROMPT:
            self.prompt_s.observe(self._chunks_s / tokens)
        if tokens:
            self._chunks_s = 0.0

    def report(self) -> dict[str, float]:
        """Return the estimates by name; the names state the units."""
        model = self.iteration.coefficients
        return {
            "iteration_s": self.iteration.iteration_s.value,
            "iteration_base_s": model.base_s,
            "iteration_per_token_s": model.per_token_s,
            "iteration_per_slot_read_s": model.per_read_s,
            "iteration_per_token_slot_s": model.per_product_s,
            "acceptance_prior": self.prior.p,
            "compress_s_per_token": self.split_s.value,
            "inner_acceptance_prior": self.proposal_prior.p,
            "inner_drafter_s": self.drafter_s.value,
            **self.link.report(),
        }
