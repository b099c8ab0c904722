"""Reports iterations to the sinks, and running requests to the live page."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol

from vericache_sglang.former_names import with_former_names
from vericache_sglang.observability.record import (
    IterationRecord,
    Phase,
    RowRecord,
    VerdictRecord,
)
from vericache_sglang.scheduling.plan import (
    Deliver,
    Draft,
    Plain,
    Residency,
    Verify,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vericache_sglang.observability.guard import Guard
    from vericache_sglang.observability.link_log import LinkLog
    from vericache_sglang.observability.record import Observer
    from vericache_sglang.scheduling.plan import Move, RowAction
    from vericache_sglang.scheduling.runtime import Runtime
    from vericache_sglang.scheduling.scheduled_request import ScheduledRequest

P = ParamSpec("P")

PHASES: Mapping[type, Phase] = {
    Draft: "draft",
    Verify: "verify",
    Plain: "plain",
    Wait: "wait",
    Deliver: "wait",
}

MOST_LANES = 256
"""Most requests on the live page."""

SLOW_S = 1.0
"""Time limit of a sink per iteration, in seconds; a slower sink counts as failed."""


class RunningRequest(Protocol):
    """Reported state of a request; the engine's ``RequestState`` implements it."""

    @property
    def rid(self) -> str:
        """Request id."""

    @property
    def drafted(self) -> int:
        """Tokens drafted since the last verification, at least."""

    @property
    def drafted_max(self) -> int:
        """Upper bound of ``drafted``."""

    @property
    def prompt(self) -> int:
        """Tokens prefilled."""

    @property
    def emitted(self) -> int:
        """Tokens emitted since the prefill."""


@dataclass(slots=True)
class _Iteration:
    """An iteration that is not reported yet: its end or its results are pending."""

    index: int
    began: float
    positions: tuple[int, ...]
    rows: Sequence[tuple[str, Phase, int]]
    verdicts: tuple[VerdictRecord, ...] = ()
    ended: float | None = None
    moves: tuple[Move, ...] = ()
    transfers: Any = ()
    reservations: Any = None
    emitted: list[int] | None = None
    discarded: frozenset[int] = frozenset()

    @property
    def known(self) -> bool:
        return self.ended is not None and self.emitted is not None

    def record(self) -> IterationRecord:
        emitted = self.emitted or []
        return IterationRecord(
            index=self.index,
            began=self.began,
            ended=self.ended or self.began,
            rows=tuple(
                RowRecord(*row, emitted[i], i in self.discarded)
                for i, row in zip(self.positions, self.rows, strict=True)
            ),
            moves=self.moves,
            transfers=self.transfers,
            reservations=self.reservations,
            verdicts=self.verdicts,
        )


def _guarded(method: Callable[P, None]) -> Callable[P, None]:
    """Run a method of ``IterationReporter`` under its guard, for the worker."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        reporter: Any = args[0]
        guard, name = reporter._guard, "iteration reporter"
        guard.call(name, partial(method, *args, **kwargs), None)
        if guard.is_off(name):
            reporter._sinks.clear()
            reporter._open.clear()

    return call


class IterationReporter:
    """Keeps the last iteration for the live page and sends each one to the sinks.

    An iteration is sent once its end and its results are known. Exceptions raised here
    or in a sink never reach the worker.

    Args:
        runtime: Source of plans and rings.
        link: Source of ended copies.
        sinks: Name -> observer; if empty, nothing is recorded.
        guard: Calls the sinks and the methods of this class.
    """

    def __init__(
        self,
        runtime: Runtime,
        link: LinkLog,
        sinks: Mapping[str, Observer],
        guard: Guard,
    ) -> None:
        self._runtime = runtime
        self._link = link
        self._sinks = dict(sinks)
        self._guard = guard
        self._last: tuple[
            Mapping[int, RunningRequest], Mapping[int, RowAction] | None
        ] = ({}, None)
        self._index = 0
        self._open: deque[_Iteration] = deque()

    def begin(
        self,
        requests: Mapping[int, RunningRequest],
        actions: Mapping[int, RowAction] | None,
    ) -> None:
        """Record the batch of an iteration at its launch.

        Args:
            requests: Position in the batch -> request.
            actions: Position in the batch -> planned action; None if all rows are
                autoregressive.
        """
        self._index += 1
        self._last = requests, actions
        if self._sinks:
            self._open_record()

    @_guarded
    def _open_record(self) -> None:
        requests, actions = self._last
        rows: list[tuple[str, Phase, int]] = []
        for i, request in requests.items():
            action = Plain(request.rid) if actions is None else actions[i]
            width = 0 if isinstance(action, Wait) else 1 + action.proposals
            if isinstance(action, Verify):
                width += request.drafted_max
            rows.append((request.rid, PHASES[type(action)], width))
        verdicts = tuple(
            VerdictRecord(each.rid, each.drafts, len(each.tokens), each.seconds)
            for each in (actions or {}).values()
            if isinstance(each, Deliver) and each.seconds
        )
        began = time.perf_counter()
        self._open.append(
            _Iteration(self._index, began, tuple(requests), rows, verdicts)
        )

    def end(self, moves: Sequence[Move]) -> None:
        """Record the end of an iteration on the host.

        Args:
            moves: KV moves made.
        """
        if self._sinks:
            self._close_record(moves)

    @_guarded
    def _close_record(self, moves: Sequence[Move]) -> None:
        iteration = self._open[-1]
        iteration.ended, iteration.moves = time.perf_counter(), tuple(moves)
        iteration.transfers = self._link.drain()
        iteration.reservations = {
            name: tuple(ring.horizon())
            for name, ring in self._runtime.pacing.rings().items()
        }
        self._send()

    def recorded(
        self, counts: Callable[[], list[int]], discarded: frozenset[int]
    ) -> None:
        """Record the results of the oldest iteration, ended or not.

        Args:
            counts: Returns the tokens emitted, by position in the batch; called only if
                there is a sink.
            discarded: Positions of requests that had ended before.
        """
        if self._open:
            self._note_results(counts, discarded)

    @_guarded
    def _note_results(
        self, counts: Callable[[], list[int]], discarded: frozenset[int]
    ) -> None:
        for iteration in self._open:
            if iteration.emitted is None:
                iteration.emitted, iteration.discarded = counts(), discarded
                break
        self._send()

    def _send(self) -> None:
        while self._open and self._open[0].known:
            record = self._open.popleft().record()
            for name, sink in self._sinks.items():
                part = partial(sink.iteration, record)
                self._guard.call(name, part, None, slow_s=SLOW_S)

    def idle(self) -> None:
        """Notify the sinks that no request is left."""
        self._last = {}, None
        for name, sink in self._sinks.items():
            self._guard.call(name, sink.idle, None)

    def close(self) -> None:
        """Close the sinks when the process ends."""
        for name, sink in self._sinks.items():
            self._guard.call(name, sink.close, None)

    def report(self, requests: Mapping[str, RunningRequest]) -> dict[str, Any]:
        """Return the state of requests and rings for the live page."""
        last, actions = self._last
        phases = {
            each.rid: "plain" if actions is None else PHASES[type(actions[i])]
            for i, each in last.items()
        }
        lanes = []
        for request in islice(requests.values(), MOST_LANES):
            track = self._runtime.tracks.get(request.rid)
            residency = Residency.DEVICE if track is None else track.residency
            swapped_out = residency is Residency.SWAPPED
            lanes.append(
                {
                    "rid": request.rid,
                    "phase": residency.value
                    if swapped_out
                    else phases.get(request.rid, "wait"),
                    "drafts": request.drafted,
                    "most": _drafts_wanted(track, request.drafted),
                    "prompt": request.prompt,
                    "emitted": request.emitted,
                    "residency": residency.value,
                    "acceptance": track.acceptance.p if track else 0.0,
                }
            )
        rings = self._runtime.pacing.rings().items()
        return {
            "lanes": lanes,
            "rings": {
                name: with_former_names(
                    "ring", {"limit": ring.limit, "iterations": ring.horizon()}
                )
                for name, ring in rings
            },
        }


def _drafts_wanted(track: ScheduledRequest | None, drafts: int) -> int:
    """Return the draft length chosen for a cycle; 0 for a request without drafts.

    Excludes further drafts, up to the graph's width, after a deadline miss.
    """
    if track is None or track.most < 0:
        return 0
    return max(drafts, track.wanted(track.most))
