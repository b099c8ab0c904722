"""How fast segments come from the store, as seen."""

from __future__ import annotations

from math import inf
from threading import Lock

FORGET = 0.9
"""What was seen before counts so much less with every segment."""


class Pace:
    """Seconds per byte of reads; of writes, as long as nothing was read. Thread-safe.

    Of the whole call: records, checks and copies included, the wait for a turn not.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._seen = {"read": (0.0, 0.0), "write": (0.0, 0.0)}

    def note_read(self, nbytes: int, seconds: float) -> None:
        """Record a segment that was read whole."""
        self._note("read", nbytes, seconds)

    def note_write(self, nbytes: int, seconds: float) -> None:
        """Record a segment that was written."""
        self._note("write", nbytes, seconds)

    @property
    def s_per_byte(self) -> float:
        """Return what a fetch takes, in seconds per byte; ``inf`` before any."""
        with self._lock:
            for nbytes, seconds in self._seen.values():
                if nbytes:
                    return seconds / nbytes
        return inf

    def _note(self, what: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            bytes_before, before_s = self._seen[what]
            self._seen[what] = (
                FORGET * bytes_before + nbytes,
                FORGET * before_s + seconds,
            )
