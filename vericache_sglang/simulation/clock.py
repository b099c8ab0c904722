"""An event clock."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Simulated time, and what happens at later times.

    Attributes:
        now: Simulated time, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        # Orders events of equal time by call; callbacks cannot be compared.
        self._serial = count()

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """Schedule a callback at ``when``; a past time runs at the next ``advance``."""
        heapq.heappush(self._events, (max(when, self.now), next(self._serial), happen))

    def next_event(self) -> float | None:
        """Return the time of the next event; None if there is none."""
        return self._events[0][0] if self._events else None

    def advance(self, to: float) -> None:
        """Advance the clock to ``to`` and run all events up to it, in order."""
        while self._events and self._events[0][0] <= to:
            when, _, happen = heapq.heappop(self._events)
            self.now = max(self.now, when)
            happen()
        self.now = max(self.now, to)
