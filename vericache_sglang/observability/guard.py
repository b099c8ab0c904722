"""Isolates serving from exceptions of observers."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Consecutive failures after which an observer is disabled."""

T = TypeVar("T")


class Guard:
    """Calls observers, and catches and logs their exceptions.

    Only the first failure of an observer is logged with its traceback. After
    ``MOST_FAILURES`` in a row it is disabled until the process ends.

    Args:
        clock: Returns the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._in_a_row: dict[str, int] = {}
        self._logged: set[str] = set()

    def is_off(self, name: str) -> bool:
        """Return whether an observer is disabled."""
        return self._in_a_row.get(name, 0) >= MOST_FAILURES

    def call(
        self,
        name: str,
        function: Callable[[], T],
        default: T,
        slow_s: float = math.inf,
    ) -> T:
        """Call ``function`` and return its value.

        Args:
            name: Name of the observer in logs.
            default: Returned if it raises or the observer is disabled.
            slow_s: Time limit, in seconds; exceeding it counts as a failure.
        """
        if self.is_off(name):
            return default
        began = self._clock()
        try:
            found = function()
        except Exception:  # noqa: BLE001  # serving must continue
            self.failed(name)
            return default
        seconds = self._clock() - began
        if seconds > slow_s:
            self.failed(name, f"took {seconds:.1f} s")
        else:
            self._in_a_row.pop(name, None)
        return found

    def failed(self, name: str, reason: str = "") -> None:
        """Count a failure: ``reason``, or else the exception being handled."""
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
        if name not in self._logged:
            self._logged.add(name)
            logger.error(
                "VeriCache: the %s %s; serving goes on",
                name,
                reason or "failed",
                exc_info=not reason,
            )
        if self.is_off(name):
            logger.error("VeriCache: the %s is switched off", name)
