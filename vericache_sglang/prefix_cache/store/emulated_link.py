"""A slow link to a store, emulated: for tests and experiments on one machine."""

from __future__ import annotations

import logging
import time
from math import inf
from threading import Lock
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

RATE, LATENCY = "read_mb_per_s", "latency_ms"
"""Its keys in HiCache's extra configuration, in MB/s and milliseconds."""


class EmulatedLink:
    """Delays reads as a link would that carries one after the other. Thread-safe.

    Args:
        bytes_per_s: Its rate, > 0.
        latency_s: Seconds before the first byte of each read.
    """

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._lock = Lock()
        self._free_at = 0.0

    @classmethod
    def taken_from(
        cls, extra: Mapping[str, object]
    ) -> tuple[EmulatedLink | None, dict[str, object]]:
        """Return the link that an extra configuration asks for, and its other keys.

        Raises:
            ConfigError: A value is not a number in bounds.
        """
        others = {
            key: each for key, each in extra.items() if key not in (RATE, LATENCY)
        }
        if len(others) == len(extra):
            return None, others
        rate, latency = extra.get(RATE, inf), extra.get(LATENCY, 0.0)
        if not (isinstance(rate, int | float) and rate > 0):
            raise ConfigError(f"{RATE} must be a number > 0, got {rate!r}")
        if not (isinstance(latency, int | float) and latency >= 0):
            raise ConfigError(f"{LATENCY} must be a number >= 0, got {latency!r}")
        logger.warning(
            "VeriCache: reads from the store are EMULATED at %s MB/s and %s ms",
            *(rate, latency),
        )
        return cls(rate * 1e6, latency / 1e3), others

    def carry(self, nbytes: int) -> None:
        """Wait as long as the link takes for ``nbytes`` bytes."""
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + nbytes / self._bytes_per_s
            arrived = self._free_at + self._latency_s
        time.sleep(max(0.0, arrived - time.monotonic()))
