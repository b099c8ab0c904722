"""Peers that send nonsense are ignored for a while."""

from __future__ import annotations

from threading import Lock
from typing import Generic, TypeVar

Peer = TypeVar("Peer")

MOST_FAULTS = 10
"""Malformed messages after which a peer is ignored."""
IGNORED_S = 60.0
"""Time for which it is, in seconds."""
MOST_PEERS = 1000
"""Peers that are remembered."""


class Quarantine(Generic[Peer]):
    """Counts the faults of peers, for any thread; time is passed in."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._faults: dict[Peer, int] = {}
        self._until: dict[Peer, float] = {}

    def blame(self, peer: Peer, now: float) -> bool:
        """Count a fault; return whether the peer is ignored from now on."""
        with self._lock:
            count = self._faults.pop(peer, 0) + 1
            if count >= MOST_FAULTS:
                self._until[peer] = now + IGNORED_S
                return True
            self._faults[peer] = count
            if len(self._faults) > MOST_PEERS:
                del self._faults[next(iter(self._faults))]
            if len(self._until) > MOST_PEERS:
                del self._until[next(iter(self._until))]
            return False

    def holds(self, peer: Peer, now: float) -> bool:
        """Return whether a peer is ignored."""
        with self._lock:
            until = self._until.get(peer)
            if until is not None and now >= until:
                del self._until[peer]
                return False
            return until is not None
