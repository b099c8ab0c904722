"""What the worker tells observers, and what the live page asks it."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from vericache_sglang.scheduling.plan import Draft, Plain, Residency, Verify, Wait
from vericache_sglang.telemetry.record import IterationRecord, Phase, RowRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

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


class Watch:
    """Remembers the last iteration and passes every one on.

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
        self._seats: tuple[int, ...] = ()
        self._index = 0
        self._began = 0.0

    def begin(
        self, seats: Mapping[int, RequestState], actions: Mapping[int, RowAction] | None
    ) -> None:
        """Take note of what is about to run.

        Args:
            seats: Position in the batch -> request.
            actions: Position in the batch -> what it does; None where all decode
                plainly.
        """
        self._began = time.perf_counter()
        self._index += 1
        self._seats = tuple(seats)
        self._rows = []
        for i, state in seats.items():
            phase: Phase = "plain" if actions is None else PHASES[type(actions[i])]
            width = len(state.drafts) + 1 if phase == "verify" else phase != "wait"
            self._rows.append((state.rid, phase, int(width)))

    def end(self, accept_lens: torch.Tensor, moves: Sequence[Move]) -> None:
        """Pass the iteration on; reads nothing where nobody wants to know.

        Args:
            accept_lens: [batch] int32 tokens emitted, by position in the batch.
            moves: Changes of residency made.
        """
        if not self._observers:
            return
        emitted = accept_lens.tolist()
        record = IterationRecord(
            index=self._index,
            began=self._began,
            ended=time.perf_counter(),
            rows=tuple(
                RowRecord(*row, emitted[i])
                for i, row in zip(self._seats, self._rows, strict=True)
            ),
            moves=tuple(moves),
            transfers=self._link.drain(),
            reservations={
                name: tuple(ring.horizon())
                for name, ring in self._runtime.pacing.rings().items()
            },
        )
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
                    "drafts": len(state.drafts),
                    "most": _drafts_wanted(track, len(state.drafts)),
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
