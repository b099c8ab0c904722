"""The one place that keeps faults of observers away from serving."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Failures in a row after which an observer is switched off."""

T = TypeVar("T")


class Guard:
    """Calls observers; what one raises is logged and goes no further.

    The first failure of an observer is logged with its traceback, later ones are not.
    After ``MOST_FAILURES`` in a row it is switched off for the life of the process.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._in_a_row: dict[str, int] = {}
        self._logged: set[str] = set()

    def is_off(self, name: str) -> bool:
        """Return whether an observer is switched off."""
        return self._in_a_row.get(name, 0) >= MOST_FAILURES

    def call(
        self,
        name: str,
        function: Callable[[], T],
        default: T,
        slow_s: float = math.inf,
    ) -> T:
        """Return what ``function`` returns.

        Args:
            name: The observer's, as logs show it.
            function: Its part.
            default: Returned where it raises or is switched off.
            slow_s: Seconds; taking longer is a failure too.
        """
        if self.is_off(name):
            return default
        began = self._clock()
        try:
            found = function()
        except Exception:  # noqa: BLE001  # whatever it is, serving goes on
            self.failed(name)
            return default
        seconds = self._clock() - began
        if seconds > slow_s:
            self.failed(name, f"took {seconds:.1f} s")
        else:
            self._in_a_row.pop(name, None)
        return found

    def failed(self, name: str, reason: str = "") -> None:
        """Count a failure; without a ``reason`` it is the exception being handled."""
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
