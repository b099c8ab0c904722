"""What is counted while simulating, and the figures made of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vericache_sglang.simulation.machine import SimulatedMachine


@dataclass(slots=True)
class SimulatedCounters:
    """Sums since the start.

    Attributes:
        now_s: Simulated time.
        tokens: Tokens emitted.
        finished: Requests finished.
        iterations: Forwards.
        forward_s: Time in forwards.
        hbm_s: Time the forwards' reads take at the full rate.
        compute_s: Time their arithmetic takes at the full rate.
        rows: Requests in memory, summed over forwards.
        waits: Those of them left out of the forward.
        rounds: Verifications of at least one draft.
        drafted: Drafts verified.
        accepted: Drafts accepted.
        link_in_s: Time the link to the device was busy.
        link_out_s: Time the link to the host was busy.
        retractions: Requests thrown out for want of device memory.
    """

    now_s: float = 0.0
    tokens: int = 0
    finished: int = 0
    iterations: int = 0
    forward_s: float = 0.0
    hbm_s: float = 0.0
    compute_s: float = 0.0
    rows: int = 0
    waits: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    link_in_s: float = 0.0
    link_out_s: float = 0.0
    retractions: int = 0

    def at(self, machine: SimulatedMachine) -> SimulatedCounters:
        """Return a copy that stands, with the clock and the links read."""
        return replace(
            self,
            now_s=machine.now,
            link_in_s=machine.to_device.busy_s(machine.now),
            link_out_s=machine.to_host.busy_s(machine.now),
        )

    def since(self, earlier: SimulatedCounters) -> SimulatedCounters:
        """Return what was added since ``earlier``."""
        before = asdict(earlier)
        return SimulatedCounters(
            **{name: value - before[name] for name, value in asdict(self).items()}
        )


@dataclass(slots=True)
class Gaps:
    """Times between emissions of one request, all requests together.

    Attributes:
        bursts: (gap in seconds, tokens emitted at its end), in order.
    """

    bursts: list[tuple[float, int]] = field(default_factory=list)

    def per_token_s(self, share: float) -> float:
        """Return a quantile over tokens of the gap divided by its tokens, in s."""
        return quantile(((gap / n, n) for gap, n in self.bursts), share)

    def burst_s(self, share: float) -> float:
        """Return a quantile over bursts of the gap before them, in seconds."""
        return quantile(((gap, 1) for gap, _ in self.bursts), share)


def quantile(weighted: Iterable[tuple[float, int]], share: float) -> float:
    """Return the smallest value that at least ``share`` of the weight is not above.

    Args:
        weighted: (value, weight > 0).
        share: In [0, 1].

    Returns:
        0 when there are no values.
    """
    ordered = sorted(weighted)
    wanted = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        wanted -= weight
        if wanted <= 0:
            return value
    return ordered[-1][0] if ordered else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of one simulated run; all of them SIMULATED.

    Attributes:
        policy: Name of the policy.
        tokens_per_s: Throughput of all requests.
        seconds: Simulated time they are measured over.
        finished: Requests finished, those before the measuring included.
        iterations: Forwards.
        batch: Mean requests in memory.
        accepted: Mean drafts accepted in a round.
        drafted: Mean drafts of a round.
        link_in_share: Share of the time the link to the device is busy.
        link_out_share: The same to the host.
        hbm_share: Share of the time device memory is read.
        compute_share: Share of the peak arithmetic done.
        wait_share: Share of the requests in memory that a forward leaves out.
        itl_p50_s: Median over tokens of the gap per token.
        itl_p99_s: 99th percentile of it.
        burst_p99_s: 99th percentile of the gap before an emission.
        peak_staged_bytes: Most staged at once.
        peak_pool_bytes: Most held by requests at once.
        swapped: Times a request was parked and came back.
        parked_p99_s: 99th percentile of how long it was away.
        retractions: Requests thrown out and prefilled again.
        slips: Iterations by which reloads or verifications were late, summed.
        held: What is held after the last request, by name, each to be 0; empty where
            a workload has no last request.
    """

    policy: str
    tokens_per_s: float
    seconds: float
    finished: int
    iterations: int
    batch: float
    accepted: float
    drafted: float
    link_in_share: float
    link_out_share: float
    hbm_share: float
    compute_share: float
    wait_share: float
    itl_p50_s: float
    itl_p99_s: float
    burst_p99_s: float
    peak_staged_bytes: int
    peak_pool_bytes: int
    swapped: int
    swapped_p99_s: float
    retractions: int
    slips: int
    held: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a finished run leaves behind for ``result``."""

    policy: str
    machine: SimulatedMachine
    start: SimulatedCounters
    end: SimulatedCounters
    held: dict[str, int]
    gaps: Gaps
    swapped_waits_s: list[float]
    slips: int


def result(run: Run) -> Result:
    """Make the figures of a finished run."""
    counted = run.end.since(run.start)
    seconds = max(counted.now_s, 1e-12)
    token_bytes = run.machine.costs.token_bytes
    rounds = max(1, counted.rounds)
    return Result(
        policy=run.policy,
        tokens_per_s=counted.tokens / seconds,
        seconds=seconds,
        finished=run.end.finished,
        iterations=counted.iterations,
        batch=counted.rows / max(1, counted.iterations),
        accepted=counted.accepted / rounds,
        drafted=counted.drafted / rounds,
        link_in_share=counted.link_in_s / seconds,
        link_out_share=counted.link_out_s / seconds,
        hbm_share=counted.hbm_s / seconds,
        compute_share=counted.compute_s / seconds,
        wait_share=counted.waits / max(1, counted.rows),
        itl_p50_s=run.gaps.per_token_s(0.5),
        itl_p99_s=run.gaps.per_token_s(0.99),
        burst_p99_s=run.gaps.burst_s(0.99),
        peak_staged_bytes=run.machine.staging.peak * token_bytes,
        peak_pool_bytes=run.machine.pool.peak * token_bytes,
        swapped=len(run.swapped_waits_s),
        swapped_p99_s=quantile(((wait, 1) for wait in run.swapped_waits_s), 0.99),
        retractions=run.end.retractions,
        slips=run.slips,
        held=run.held,
    )
