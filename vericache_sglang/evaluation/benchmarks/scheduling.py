"""Scheduling overhead: CPU time in the runtime per iteration, by running requests.

A trivial executor performs every plan at once; only calls into the runtime and its
estimates are timed.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections import deque
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from vericache_sglang.evaluation.benchmark import Benchmark
from vericache_sglang.scheduling.estimates import Estimates
from vericache_sglang.scheduling.iteration_model import Work
from vericache_sglang.scheduling.plan import (
    Compress,
    Draft,
    Plain,
    Plan,
    RequestSpec,
    Residency,
    RowResult,
    SchedulerInput,
    Verify,
)
from vericache_sglang.scheduling.runtime import Runtime
from vericache_sglang.scheduling.settings import RuntimeSettings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from vericache_sglang.evaluation.benchmark import Results

T = TypeVar("T")

DRAFT_LENGTH = 32
PROMPT, DROPPED = 16_000, 12_000
OUTPUT = 512
ITERATION_S = 0.03
LINK_BYTES_PER_S = 50e9
"""The modelled machine; only what the runtime asks of it matters."""


class SchedulingLoad:
    """Runs a runtime in isolation and times its calls.

    Args:
        requests: Number of running requests; a finished one is replaced.
        residency: See ``RuntimeSettings``.
        contended: The link carries two thirds of the requests' prefetch demand.
        seed: Draws output lengths, accepted drafts and iteration times.
    """

    def __init__(
        self, requests: int, residency: str, *, contended: bool, seed: int
    ) -> None:
        self._random = Random(seed)
        rounds = max(1.0, requests / (DRAFT_LENGTH + 1))
        self._prefetch_bytes = LINK_BYTES_PER_S * ITERATION_S / rounds
        self._prefetch_bytes *= 1.5 if contended else 0.5
        settings = RuntimeSettings(
            residency=residency,
            draft_length=DRAFT_LENGTH,
            max_verifies=int(2 * rounds) + 1,
            staging_slots=int(4 * rounds + 2) * DROPPED,
            token_bytes=max(1, int(self._prefetch_bytes / DROPPED)),
        )
        self.runtime = Runtime(settings, Estimates())
        self._state_factory: deque[tuple[int, str]] = deque()
        self._drafts: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._requests = requests
        self._started = 0
        self._link_free = 0.0
        self.spent_ns = 0
        for _ in range(requests):
            # Compressed here at once; plans would compress two per iteration.
            self.runtime.moved(Compress(self._arrive(), Residency.HOST))

    def iteration(self) -> int:
        """Run one iteration; return the nanoseconds spent in the runtime."""
        self.spent_ns = 0
        while len(self._left) < self._requests:
            self._arrive()
        plan = self._timed(lambda: self.runtime.plan(self._world()))
        self._perform(plan)
        work = Work(2 * self._requests, 4000 * self._requests, 8000 * self._requests)
        seconds = ITERATION_S * self._random.uniform(0.95, 1.05)
        self._timed(lambda: self.runtime.estimates.iteration.observe(work, seconds))
        return self.spent_ns

    def _timed(self, call: Callable[[], T]) -> T:
        start = time.perf_counter_ns()
        answer = call()
        self.spent_ns += time.perf_counter_ns() - start
        return answer

    def _world(self) -> SchedulerInput:
        arrived = []
        while self._state_factory and self._state_factory[0][0] <= self.runtime.now:
            arrived.append(self._state_factory.popleft()[1])
        rows = self._requests
        # Memory is tight and requests wait: every choice of residency is weighed.
        return SchedulerInput(
            free_slots=rows * (2 * DRAFT_LENGTH + 3) + DROPPED // 2,
            host_slots=1 << 40,
            rows=rows,
            blocked=True,
            arrived=tuple(arrived),
        )

    def _arrive(self) -> str:
        rid = f"r{self._started}"
        self._started += 1
        # Spread from the start, as after a long time.
        most = self._random.randint(OUTPUT // 8, OUTPUT)
        shape = RequestSpec(
            rid=rid,
            prompt=PROMPT,
            kept=PROMPT - DROPPED,
            dropped=DROPPED,
            remaining=most,
        )
        self._left[rid], self._drafts[rid] = most, 0
        self._timed(lambda: self.runtime.arrive(shape))
        return rid

    def _perform(self, plan: Plan) -> None:
        link = self.runtime.estimates.link
        size = int(self._prefetch_bytes)
        for stage_in in plan.stage_ins:
            seconds = size / LINK_BYTES_PER_S
            now = float(plan.iteration)
            self._link_free = max(now, self._link_free) + seconds / ITERATION_S
            self._state_factory.append((int(self._link_free), stage_in.rid))
            self._timed(partial(link.observe, size, seconds, "in"))
        emitted, results = {}, []
        for rid, action in plan.rows.items():
            if isinstance(action, Plain):
                emitted[rid] = 1
            elif isinstance(action, Draft):
                self._drafts[rid] += 1
            elif isinstance(action, Verify):
                results.append(self._verify(rid))
                emitted[rid] = results[-1].emitted
        self._timed(lambda: self.runtime.report(results))
        for rid, tokens in emitted.items():
            self._emit(rid, tokens)
        for move in plan.moves:
            if move.rid in self._left:
                self._timed(partial(self.runtime.moved, move))

    def _verify(self, rid: str) -> RowResult:
        drafted, self._drafts[rid] = self._drafts[rid], 0
        right = 0
        while right < drafted and self._random.random() < 0.97:
            right += 1
        return RowResult(rid, drafted, right + 1)

    def _emit(self, rid: str, tokens: int) -> None:
        self._left[rid] -= tokens
        if self._left[rid] <= 0:
            del self._left[rid], self._drafts[rid]
            self._timed(lambda: self.runtime.leave(rid))


def measure(load: SchedulingLoad, iterations: int, warm: int) -> dict[str, float]:
    """Return median and 99th percentile per iteration, in ms."""
    for _ in range(warm):
        load.iteration()
    spent = [load.iteration() / 1e6 for _ in range(iterations)]
    median, most = np.percentile(spent, [50, 99]).tolist()
    return {
        "median_ms": median,
        "p99_ms": most,
        "requests_host": float(load.runtime.figures()["requests_host"]),
    }


def _profile(load: SchedulingLoad, iterations: int) -> None:
    with cProfile.Profile() as profiler:
        for _ in range(iterations):
            load.iteration()
    stats = pstats.Stats(profiler, stream=sys.stderr)
    stats.sort_stats("tottime").print_stats(18)


def _measure(options: argparse.Namespace, results: Results) -> None:
    for residency in ("host", "auto"):
        for contended in (False, True):
            for requests in options.requests:
                kind = "contended" if contended else "free"
                name = f"{requests} requests, {residency}, {kind} link"
                results.row(name, _row, options, requests, residency, contended)


def _row(
    options: argparse.Namespace, requests: int, residency: str, contended: bool
) -> dict[str, Any]:
    load = SchedulingLoad(requests, residency, contended=contended, seed=options.seed)
    # Large sizes show their median in fewer iterations.
    count = max(200, min(options.iterations, 400_000 // requests))
    where = {"residency": residency, "contended": contended, "requests": requests}
    found = measure(load, count, warm=300)
    if options.profile:
        _profile(load, count)
    return {**where, **found}


SCHEDULING = Benchmark(
    about="Milliseconds that the scheduler takes to plan one iteration.",
    options={
        "requests": ([16, 64, 256, 1024, 4096], "running at once"),
        "iterations": (1000, "timed, at most"),
        "profile": (False, "print where the time goes"),
    },
    measure=_measure,
    selecting=("requests", "profile"),
)
