"""What the worker tells observers, and what the live page asks it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from vericache_sglang.scheduling.plan import Draft, Plain, Residency, Verify, Wait
from vericache_sglang.telemetry.record import IterationRecord, Phase, RowRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vericache_sglang.engine.link_log import LinkLog
    from vericache_sglang.engine.state import RequestState
    from vericache_sglang.scheduling.plan import Move, RowAction
    from vericache_sglang.scheduling.runtime import Runtime
    from vericache_sglang.scheduling.track import Track
    from vericache_sglang.telemetry.record import Observer

PHASES: Mapping[type, Phase] = {
    Draft: "draft",
    Verify: "verify",
    Plain: "plain",
    Wait: "wait",
}

MOST_LANES = 256
"""Requests shown; a page has no use for more."""


@dataclass(slots=True)
class _Iteration:
    """An iteration on its way to observers; it may land before or after it ends."""

    index: int
    began: float
    seats: tuple[int, ...]
    rows: Sequence[tuple[str, Phase, int]]
    ended: float | None = None
    moves: tuple[Move, ...] = ()
    transfers: Any = ()
    reservations: Any = None
    emitted: list[int] | None = None

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
                RowRecord(*row, emitted[i])
                for i, row in zip(self.seats, self.rows, strict=True)
            ),
            moves=self.moves,
            transfers=self.transfers,
            reservations=self.reservations,
        )


class Watch:
    """Remembers the last iteration and passes every one on, once it has landed.

    Args:
        runtime: What is planned.
        link: Copies that have ended.
        observers: Who wants to know; nothing is recorded where there is nobody.
    """

    def __init__(
        self, runtime: Runtime, link: LinkLog, observers: Sequence[Observer]
    ) -> None:
        self._runtime = runtime
        self._link = link
        self._observers = tuple(observers)
        self._rows: list[tuple[str, Phase, int]] = []
        self._index = 0
        self._open: deque[_Iteration] = deque()

    def begin(
        self, seats: Mapping[int, RequestState], actions: Mapping[int, RowAction] | None
    ) -> None:
        """Take note of what is about to run.

        Args:
            seats: Position in the batch -> request.
            actions: Position in the batch -> what it does; None where all decode
                plainly.
        """
        self._index += 1
        self._rows = []
        for i, state in seats.items():
            phase: Phase = "plain" if actions is None else PHASES[type(actions[i])]
            width = state.drafted + 1 if phase == "verify" else phase != "wait"
            self._rows.append((state.rid, phase, int(width)))
        if self._observers:
            began = time.perf_counter()
            self._open.append(_Iteration(self._index, began, tuple(seats), self._rows))

    def end(self, moves: Sequence[Move]) -> None:
        """Take note of the end of an iteration on the host.

        Args:
            moves: Changes of residency made.
        """
        if not self._observers:
            return
        iteration = self._open[-1]
        iteration.ended, iteration.moves = time.perf_counter(), tuple(moves)
        iteration.transfers = self._link.drain()
        iteration.reservations = {
            name: tuple(ring.horizon())
            for name, ring in self._runtime.pacing.rings().items()
        }
        self._pass_on()

    def landed(self, counts: Callable[[], list[int]]) -> None:
        """Take note of what the oldest iteration emitted, whether it has ended or not.

        Args:
            counts: Tokens emitted, by position in the batch; asked for only where
                somebody wants to know.
        """
        for iteration in self._open:
            if iteration.emitted is None:
                iteration.emitted = counts()
                break
        self._pass_on()

    def _pass_on(self) -> None:
        while self._open and self._open[0].known:
            record = self._open.popleft().record()
            for observer in self._observers:
                observer.iteration(record)

    def idle(self) -> None:
        """Tell observers that no request is left."""
        for observer in self._observers:
            observer.idle()

    def close(self) -> None:
        """Let observers write what they hold; the process ends."""
        for observer in self._observers:
            observer.close()

    def report(self, states: Mapping[str, RequestState]) -> dict[str, Any]:
        """Return the lanes and the rings, for the live page."""
        phases = {rid: phase for rid, phase, _ in self._rows}
        lanes = []
        for state in islice(states.values(), MOST_LANES):
            track = self._runtime.tracks.get(state.rid)
            residency = Residency.DEVICE if track is None else track.residency
            parked = residency is Residency.PARKED
            lanes.append(
                {
                    "rid": state.rid,
                    "phase": "parked" if parked else phases.get(state.rid, "wait"),
                    "drafts": state.drafted,
                    "most": _drafts_wanted(track, state.drafted),
                    "prompt": state.prompt,
                    "emitted": state.emitted,
                    "residency": residency.value,
                    "acceptance": track.acceptance.p if track else 0.0,
                }
            )
        rings = self._runtime.pacing.rings().items()
        return {
            "lanes": lanes,
            "rings": {
                name: {"limit": ring.limit, "windows": ring.horizon()}
                for name, ring in rings
            },
        }


def _drafts_wanted(track: Track | None, drafts: int) -> int:
    """Return after how many drafts a round is to be verified; 0 where none is made.

    The chosen length, not the width of the graph up to which a late one drafts on.
    """
    if track is None or track.most < 0:
        return 0
    return max(drafts, min(track.length, track.most))
