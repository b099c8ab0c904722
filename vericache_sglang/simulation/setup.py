"""Derives the runtime's settings from a machine, a workload and a policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError
from vericache_sglang.scheduling.iteration_model import Work
from vericache_sglang.scheduling.settings import RuntimeSettings

if TYPE_CHECKING:
    from vericache_sglang.simulation.costs import Costs
    from vericache_sglang.simulation.policies import Policy
    from vericache_sglang.simulation.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Inputs that every policy of a table shares.

    Attributes:
        draft_length: Most drafts in a cycle, in tokens, >= 1.
        max_verifies: Verify rows in one forward, >= 1; lock-step has one per request.
        horizon: W, the windows of the rings, in scheduler iterations.
        host_bytes: Host memory for residual KV and swapped-out draft KV.
        precomputed: Prompts cost no prefill, and their KV is in host memory already.
        reserve: Share of the running requests' remaining tokens that must fit before
            another request is admitted, in [0, 1].
        staged_residuals: Residual KVs that "few" staging holds; 0: computed.
        proposals: Most tokens that an inner drafter proposes per row; 0: none. It costs
            nothing but the tokens that the rows run.
        proposal_accept: Probability that a proposal is accepted if those before it are.
        seed: Seed of the acceptances.
    """

    costs: Costs
    workload: Workload
    draft_length: int = 32
    max_verifies: int = 4
    horizon: int = 64
    host_bytes: float = 1e12
    precomputed: bool = True
    reserve: float = 1.0
    staged_residuals: int = 0
    proposals: int = 0
    proposal_accept: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draft_length < 1:
            raise ConfigError(f"--draft-length must be >= 1, got {self.draft_length}")
        if self.max_verifies < 1:
            raise ConfigError(f"--max-verifies must be >= 1, got {self.max_verifies}")
        if self.staged_residuals < 0:
            raise ConfigError(f"--staged must be >= 0, got {self.staged_residuals}")
        if self.proposals < 0:
            raise ConfigError(f"--inner-length must be >= 0, got {self.proposals}")
        if not 0 <= self.proposal_accept <= 1:
            raise ConfigError(
                f"--inner-accept must be in [0, 1], got {self.proposal_accept}"
            )
        if not 0 <= self.reserve <= 1:
            raise ConfigError(f"--reserve must be in [0, 1], got {self.reserve}")
        if self.host_bytes < 0:
            raise ConfigError(f"--host-gb must be >= 0, got {self.host_bytes / 1e9}")

    @property
    def host_slots(self) -> int:
        """KV slots of the host budget."""
        return int(self.host_bytes // self.costs.token_bytes)


def kept_slots(prompt: int, keep: float) -> int:
    """Return the slots of a prompt's draft KV, n >= 1."""
    return min(prompt, max(1, ceil(prompt * keep)))


def cycle_slots(setup: Setup, policy: Policy) -> int:
    """Return the slots a cycle may take beyond a request's tokens; as the runtime."""
    if not policy.drafts:
        return setup.proposals
    return 2 * (setup.draft_length + setup.proposals + 1) + 1


def settings_for(setup: Setup, policy: Policy) -> RuntimeSettings:
    """Return the runtime's settings for one policy."""
    staging, verifies = _staging(setup, policy)
    return RuntimeSettings(
        pacing=policy.pacing,
        residency=policy.residency,
        draft_length=setup.draft_length,
        proposals=setup.proposals,
        max_verifies=verifies,
        staging_slots=staging,
        token_bytes=setup.costs.token_bytes,
        horizon=setup.horizon,
        transfer_fraction=policy.prefetch / (1.0 - policy.keep),
        coalesce=policy.coalesce,
    )


@dataclass(frozen=True, slots=True)
class _Mean:
    """A mean request of the workload, in slots.

    Attributes:
        kept: Draft KV.
        whole: Prompt and output.
        output: Output alone.
        most: Largest residual KV of all requests.
        largest: Largest prompt and output of all requests.
    """

    kept: float
    whole: float
    output: float
    most: int
    largest: int


def _staging(setup: Setup, policy: Policy) -> tuple[int, int]:
    """Return the staging buffer's slots and the verify rows of a forward."""
    if policy.staging == "none":
        return 0, setup.max_verifies
    sample = setup.workload.sample()
    count = len(sample)
    mean = _Mean(
        kept=sum(kept_slots(r.prompt, policy.keep) for r in sample) / count,
        whole=sum(r.prompt + r.output for r in sample) / count,
        output=sum(r.output for r in sample) / count,
        most=max(r.prompt - kept_slots(r.prompt, policy.keep) for r in sample),
        largest=max(r.prompt + r.output for r in sample),
    )
    concurrency = setup.workload.concurrency or count
    if policy.staging == "few":
        residuals = _residuals(setup, policy, mean, concurrency)
        return mean.most * residuals, setup.max_verifies
    # All residual KV is prefetched at once, and a new request starts with full KV: B
    # full requests and one more residual KV fill the memory.
    batch = int((setup.costs.slots - mean.most) // mean.whole)
    batch = min(concurrency, max(1, batch))
    return max(mean.most, int(batch * (mean.whole - mean.output - mean.kept))), batch


def _residuals(setup: Setup, policy: Policy, mean: _Mean, concurrency: int) -> int:
    """Return how many residual KVs "few" staging holds.

    Each is held for the iterations of its prefetch, the rest of the one it starts in
    and that of its verification. Each additional one leaves memory for fewer requests,
    and the link transfers them one after the other.
    """
    if setup.staged_residuals or policy.pacing == "sequential":
        return setup.staged_residuals or 1
    costs, cycle = setup.costs, setup.draft_length + 1
    moved = policy.prefetch / (1.0 - policy.keep) * mean.most * costs.token_bytes
    prefetch_s = moved / costs.link_bytes_per_s

    margin = cycle_slots(setup, policy)

    def drafting(residuals: int) -> float:
        """Return the requests that never wait; 0 if a new request does not fit."""
        room = costs.slots - residuals * mean.most
        if room < mean.largest + margin:
            return 0.0
        batch = int((room - mean.most) // (mean.kept + mean.output + margin))
        batch = min(concurrency, max(1, batch))
        reads = round(batch * (mean.kept + mean.output))
        seconds = costs.forward_s(Work(batch, reads, reads))
        prefetch = prefetch_s / seconds
        return min(batch, cycle * residuals / (prefetch + 2), cycle / prefetch)

    return max(range(1, 2 * setup.max_verifies + 2), key=drafting)
