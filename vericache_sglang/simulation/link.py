"""One direction of the host link, as a first-in-first-out queue of copies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copy:
    """Start and end of one copy, in seconds of simulated time."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration, in seconds."""
        return self.end - self.start


class SerialLink:
    """A first-in-first-out queue of copies, each at the full rate.

    Args:
        bytes_per_s: Bandwidth, > 0.
        latency_s: Added to every copy, in seconds, >= 0.

    Attributes:
        free_at: When the last copy ends, in seconds of simulated time.
        copies: Every copy so far, in order.
    """

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self.free_at = 0.0
        self._booked_s = 0.0
        self.copies: list[Copy] = []

    def book(self, now: float, bytes_: int, after: float = 0.0) -> Copy:
        """Queue a copy.

        Args:
            now: Simulated time, in seconds; never less than in an earlier call.
            bytes_: Size, in bytes, >= 0.
            after: Earliest start, in seconds, when the source is complete.
        """
        start = max(now, self.free_at, after)
        end = start + self._latency_s + bytes_ / self._bytes_per_s
        self.free_at = end
        self._booked_s += end - start
        copy = Copy(start, end)
        self.copies.append(copy)
        return copy

    def busy_s(self, now: float) -> float:
        """Return the seconds the link has been busy up to ``now``.

        Args:
            now: Simulated time, in seconds; not before the last booking.
        """
        ahead = 0.0
        for copy in reversed(self.copies):
            if copy.end <= now:
                break
            ahead += copy.end - max(copy.start, now)
        return self._booked_s - ahead
