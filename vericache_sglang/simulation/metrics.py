"""Counters of a simulation, and the figures derived from them."""

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
        now_s: Simulated time, in seconds.
        tokens: Tokens emitted.
        finished: Requests finished.
        iterations: Forwards.
        forward_s: Time in forwards, in seconds.
        hbm_s: Time of the forwards' reads at the full bandwidth, in seconds.
        compute_s: Time of their arithmetic at the full rate, in seconds.
        rows: Requests in memory, summed over forwards.
        waits: Requests in memory that skipped a forward, summed over forwards.
        cycles: Verifications of at least one draft.
        drafted: Drafts verified.
        accepted: Drafts accepted, without bonus tokens.
        link_in_s: Busy time of the link to the device, in seconds.
        link_out_s: Busy time of the link to the host, in seconds.
        retractions: Requests retracted because device memory ran out.
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
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    link_in_s: float = 0.0
    link_out_s: float = 0.0
    retractions: int = 0

    def at(self, machine: SimulatedMachine) -> SimulatedCounters:
        """Return a snapshot, with the clock and the links' busy times."""
        return replace(
            self,
            now_s=machine.now,
            link_in_s=machine.to_device.busy_s(machine.now),
            link_out_s=machine.to_host.busy_s(machine.now),
        )

    def since(self, earlier: SimulatedCounters) -> SimulatedCounters:
        """Return the difference to ``earlier``."""
        before = asdict(earlier)
        return SimulatedCounters(
            **{name: value - before[name] for name, value in asdict(self).items()}
        )


@dataclass(slots=True)
class Gaps:
    """Times between consecutive emissions of a request, over all requests.

    Attributes:
        bursts: (gap in seconds, tokens emitted at its end), in order.
    """

    bursts: list[tuple[float, int]] = field(default_factory=list)

    def per_token_s(self, share: float) -> float:
        """Return the token-weighted quantile of the gap per token, in seconds."""
        return quantile(((gap / n, n) for gap, n in self.bursts), share)

    def burst_s(self, share: float) -> float:
        """Return the quantile over bursts of the gap before them, in seconds."""
        return quantile(((gap, 1) for gap, _ in self.bursts), share)


def quantile(weighted: Iterable[tuple[float, int]], share: float) -> float:
    """Return the smallest value with at least ``share`` of the weight at or below it.

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
        seconds: Simulated time of the measurement.
        finished: Requests finished, including those before the measurement.
        iterations: Forwards.
        batch: Mean requests in memory.
        accepted: Mean accepted drafts per cycle, without the bonus token.
        drafted: Mean drafts per cycle.
        link_in_share: Share of the time in which the link to the device is busy.
        link_out_share: Share of the time in which the link to the host is busy.
        hbm_share: Share of the time in which device memory is read.
        compute_share: Share of the peak arithmetic throughput.
        wait_share: Share of the requests in memory that skip a forward.
        itl_p50_s: Token-weighted median of the gap per token, in seconds.
        itl_p99_s: 99th percentile of the gap per token, in seconds.
        burst_p99_s: 99th percentile of the gap before an emission, in seconds.
        peak_staged_bytes: Peak use of the staging buffer.
        peak_pool_bytes: Peak use of the KV pool.
        swapped: Swap-ins of requests.
        swapped_p99_s: 99th percentile of the time swapped out, in seconds.
        retractions: Requests retracted and prefilled again.
        deadline_misses: Deadline misses of verifications, summed over iterations.
        held: Amounts still held after the last request, by name, each 0 in a correct
            run; empty for a workload without a last request.
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
    deadline_misses: int
    held: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Data of a finished run from which ``result`` is computed."""

    policy: str
    machine: SimulatedMachine
    start: SimulatedCounters
    end: SimulatedCounters
    held: dict[str, int]
    gaps: Gaps
    swapped_waits_s: list[float]
    deadline_misses: int


def result(run: Run) -> Result:
    """Return the figures of a finished run."""
    counted = run.end.since(run.start)
    seconds = max(counted.now_s, 1e-12)
    token_bytes = run.machine.costs.token_bytes
    cycles = max(1, counted.cycles)
    return Result(
        policy=run.policy,
        tokens_per_s=counted.tokens / seconds,
        seconds=seconds,
        finished=run.end.finished,
        iterations=counted.iterations,
        batch=counted.rows / max(1, counted.iterations),
        accepted=counted.accepted / cycles,
        drafted=counted.drafted / cycles,
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
        deadline_misses=run.deadline_misses,
        held=run.held,
    )
