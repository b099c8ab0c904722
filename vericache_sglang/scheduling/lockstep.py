"""The paper's two baselines: all requests draft, then all are verified.

Lock-step prefetches the residual KV of all requests and verifies them together;
sequential handles one request at a time. Both leave the link idle while drafting and
the GPU idle while prefetching; they serve as baselines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.scheduling.pacing import PacingStep, StagedRoom
from vericache_sglang.scheduling.plan import Residency

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.scheduling.ring import Ring
    from vericache_sglang.scheduling.scheduled_request import ScheduledRequest
    from vericache_sglang.scheduling.settings import RuntimeSettings


class LockStep:
    """See ``Pacing``.

    Args:
        settings: Draft length, staging buffer, verify rows.
        at_once: Requests prefetched and verified together; 1 is the sequential variant.
    """

    def __init__(self, settings: RuntimeSettings, at_once: int) -> None:
        self._settings = settings
        self._at_once = at_once
        self.room = StagedRoom(settings)
        self._members: dict[str, ScheduledRequest] = {}
        self._to_verify: list[ScheduledRequest] = []

    def begin(self, track: ScheduledRequest) -> None:
        """See ``Pacing.begin``."""
        self._members[track.rid] = track

    def expedite(self, track: ScheduledRequest) -> None:
        """See ``Pacing.expedite``: a request that ended waits for the others."""

    def end(self, track: ScheduledRequest) -> None:
        """See ``Pacing.end``."""
        self._members.pop(track.rid, None)
        if track in self._to_verify:
            self._to_verify.remove(track)
        self.room.give(track)

    def limit(self, track: ScheduledRequest) -> int:
        """See ``Pacing.limit``: no request drafts beyond the common cycle."""
        return track.wanted(self._settings.draft_length)

    def step(self, now: int) -> PacingStep:
        """See ``Pacing.step``."""
        step = PacingStep()
        if not self._to_verify and self._members:
            drafting = any(
                track.drafts < track.most for track in self._members.values()
            )
            if not drafting:
                self._to_verify = list(self._members.values())
        together = self._to_verify[: self._at_once]
        for track in together:
            if track.residency is Residency.HOST and not track.staged:
                if not self.room.take(track):
                    break
                step.stage_ins.append(track)
        # Requests that could not be prefetched join the next batch of the same cycle.
        staged = [
            track
            for track in together
            if track.residency is Residency.DEVICE or track.staged
        ]
        if staged and all(
            track.residency is Residency.DEVICE or track.ready for track in staged
        ):
            step.verifies = staged[: self._settings.max_verifies]
        return step

    def report(self) -> dict[str, int | float]:
        """See ``Pacing.report``."""
        return {"staging_held_slots": self.room.held}

    def rings(self) -> Mapping[str, Ring]:
        """See ``Pacing.rings``: nothing is reserved."""
        return {}
