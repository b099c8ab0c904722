"""Interface of pacing policies: when each request is prefetched and verified."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.scheduling.ring import Ring
    from vericache_sglang.scheduling.scheduled_request import ScheduledRequest
    from vericache_sglang.scheduling.settings import RuntimeSettings


@dataclass(slots=True)
class PacingStep:
    """Pacing decisions of one scheduler iteration.

    Attributes:
        stage_ins: Requests whose prefetch starts now.
        verifies: Requests verified in this iteration's forward.
    """

    stage_ins: list[ScheduledRequest] = field(default_factory=list)
    verifies: list[ScheduledRequest] = field(default_factory=list)


class Pacing(Protocol):
    """Schedules the prefetch and the verification of every draft-verify cycle."""

    def begin(self, track: ScheduledRequest) -> None:
        """Start a cycle, after a compress, verification, swap in or failed prefetch."""

    def expedite(self, track: ScheduledRequest) -> None:
        """Verify as early as possible: the request has nothing left to draft."""

    def end(self, track: ScheduledRequest) -> None:
        """End a cycle: verified, moved or finished. Frees its staging-buffer slots."""

    def step(self, now: int) -> PacingStep:
        """Decide one scheduler iteration.

        Args:
            now: Index of the iteration; one more than at the last call.
        """

    def limit(self, track: ScheduledRequest) -> int:
        """Return the draft count at which a request waits for its verification."""

    def report(self) -> dict[str, int | float]:
        """Return reserved and held amounts, by name."""

    def rings(self) -> Mapping[str, Ring]:
        """Return the reserve rings by name; empty if the policy reserves nothing."""


class StagedRoom:
    """Staging-buffer slots, as planned.

    Requests of one group share one prefetched residual KV, freed with its last user.

    Args:
        settings: Size of the staging buffer, and whether groups share.
    """

    def __init__(self, settings: RuntimeSettings) -> None:
        self._total = settings.staging_slots
        self._coalesce = settings.coalesce
        self._users: dict[str, set[str]] = {}
        self._slots: dict[str, int] = {}
        self.held = 0

    def key(self, track: ScheduledRequest) -> str:
        """Return the key of a request's prefetched residual KV."""
        return track.group if self._coalesce and track.group else track.rid

    def holds(self, key: str) -> bool:
        """Return whether a residual KV is prefetched or its prefetch is in flight."""
        return key in self._users

    def take(self, track: ScheduledRequest) -> bool:
        """Allocate or share slots for a residual KV; False if they do not fit."""
        key = self.key(track)
        users = self._users.get(key)
        if users is None:
            if self.held + track.spec.staged > self._total:
                return False
            self.held += track.spec.staged
            self._slots[key] = track.spec.staged
            self._users[key] = {track.rid}
        else:
            users.add(track.rid)
        track.staged = True
        return True

    def give(self, track: ScheduledRequest) -> None:
        """Drop a request's reference, if it has one; the last one frees the slots."""
        if not track.staged:
            return
        track.staged = track.ready = False
        key = self.key(track)
        users = self._users[key]
        users.discard(track.rid)
        if not users:
            del self._users[key]
            self.held -= self._slots.pop(key)
