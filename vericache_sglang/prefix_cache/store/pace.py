"""Measured speed of reads from the store."""

from __future__ import annotations

import time
from math import inf
from threading import Lock

DECAY = 0.9
"""Decay of earlier measurements per segment."""


class Pace:
    """Seconds per byte of reads, or of writes before the first read. Thread-safe.

    Covers the whole call with manifests, checksums and copies, but not the time in a
    queue.

    Attributes:
        read_at: End of the last read, in ``time.monotonic`` seconds.
    """

    def __init__(self) -> None:
        self.read_at = -inf
        self._lock = Lock()
        self._measured = {"read": (0.0, 0.0), "write": (0.0, 0.0)}

    def note(self, kind: str, nbytes: int, seconds: float) -> None:
        """Record the time to "read" or "write" (``kind``) ``nbytes`` of a segment."""
        if kind == "read":
            self.read_at = time.monotonic()
        with self._lock:
            bytes_before, before_s = self._measured[kind]
            self._measured[kind] = (
                DECAY * bytes_before + nbytes,
                DECAY * before_s + seconds,
            )

    @property
    def s_per_byte(self) -> float:
        """Seconds per byte of a fetch; ``inf`` before any measurement."""
        with self._lock:
            for nbytes, seconds in self._measured.values():
                if nbytes:
                    return seconds / nbytes
        return inf
