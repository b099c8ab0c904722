"""How fast segments come from the store, as measured."""

from __future__ import annotations

from math import inf
from threading import Lock

DECAY = 0.9
"""Weight of what was measured before, per further segment."""


class Pace:
    """Seconds per byte of reads; of writes, as long as nothing was read. Thread-safe.

    Of the whole call: manifests, checks and copies included, the wait for a turn not.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._measured = {"read": (0.0, 0.0), "write": (0.0, 0.0)}

    def note(self, kind: str, nbytes: int, seconds: float) -> None:
        """Record that a segment was read or written ("read" or "write") whole."""
        with self._lock:
            bytes_before, before_s = self._measured[kind]
            self._measured[kind] = (
                DECAY * bytes_before + nbytes,
                DECAY * before_s + seconds,
            )

    @property
    def s_per_byte(self) -> float:
        """What a fetch takes, in seconds per byte; ``inf`` before any."""
        with self._lock:
            for nbytes, seconds in self._measured.values():
                if nbytes:
                    return seconds / nbytes
        return inf
