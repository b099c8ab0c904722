"""When each drafting request is staged and verified: what every policy answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.scheduling.ring import Ring
    from vericache_sglang.scheduling.settings import RuntimeSettings
    from vericache_sglang.scheduling.track import Track


@dataclass(slots=True)
class PacingStep:
    """One iteration's answer.

    Attributes:
        stage_ins: Requests whose reload starts now.
        verifies: Requests verified in this iteration's forward.
    """

    stage_ins: list[Track] = field(default_factory=list)
    verifies: list[Track] = field(default_factory=list)


class Pacing(Protocol):
    """Places every round's reload and verification in time."""

    def begin(self, track: Track) -> None:
        """Start a round: newly split, just verified, resumed, or its reload failed."""

    def hurry(self, track: Track) -> None:
        """Bring the verification forward: there is nothing left to draft."""

    def end(self, track: Track) -> None:
        """Forget the round: verified, moved, or gone. Staged slots are given back."""

    def step(self, now: int) -> PacingStep:
        """Decide one iteration.

        Args:
            now: This iteration; one more than at the last call.
        """

    def limit(self, track: Track) -> int:
        """Return the drafts at which a request waits for its verification."""

    def report(self) -> dict[str, int | float]:
        """Return what is reserved and held, by name."""

    def rings(self) -> Mapping[str, Ring]:
        """Return what reservations are made in, by name; empty where there are none."""


class StagedRoom:
    """Slots of the staging region as the plans have spent them.

    Requests of one group use one staged complement, which leaves with its last user.

    Args:
        settings: Size of the region, and whether groups share.
    """

    def __init__(self, settings: RuntimeSettings) -> None:
        self._total = settings.staging_slots
        self._coalesce = settings.coalesce
        self._users: dict[str, set[str]] = {}
        self._slots: dict[str, int] = {}
        self.held = 0

    def key(self, track: Track) -> str:
        """Return what a request's staged complement is known by."""
        return track.group if self._coalesce and track.group else track.rid

    def holds(self, key: str) -> bool:
        """Say whether a complement is staged or on its way."""
        return key in self._users

    def take(self, track: Track) -> bool:
        """Book a request's complement, or a share of it; False where it has no room."""
        key = self.key(track)
        users = self._users.get(key)
        if users is None:
            if self.held + track.shape.staged > self._total:
                return False
            self.held += track.shape.staged
            self._slots[key] = track.shape.staged
            self._users[key] = {track.rid}
        else:
            users.add(track.rid)
        track.staged = True
        return True

    def give(self, track: Track) -> None:
        """Give a request's share back; nothing happens when it has none."""
        if not track.staged:
            return
        track.staged = track.ready = False
        key = self.key(track)
        users = self._users[key]
        users.discard(track.rid)
        if not users:
            del self._users[key]
            self.held -= self._slots.pop(key)
