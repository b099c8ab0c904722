"""What the store did so far, in numbers, and which warnings were given."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_sglang.errors import StoreError

logger = logging.getLogger(__name__)


DAMAGE = frozenset(("length", "magic", "checksum", "header", "tensor"))
"""What of ``StoreError.differs`` says that bytes changed; the rest says: another's."""


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """Totals since the store was opened.

    Attributes:
        hits: Objects that ``get`` returned.
        misses: Calls of ``get`` that returned None.
        read_bytes: Bytes of objects read and found intact.
        written_bytes: Bytes of objects handed to the backend and taken.
        checksum_failures: Objects and records that were damaged, each read counted.
        foreign: Intact ones that were not what was asked for.
        dropped_writes: Segments not stored: the queue was full, or the backend refused.
        failed_calls: Calls of the backend that raised or took too long.
        refused_calls: Calls not made, because the ones before them failed.
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    checksum_failures: int = 0
    foreign: int = 0
    dropped_writes: int = 0
    failed_calls: int = 0
    refused_calls: int = 0


class Tally:
    """Counters that any thread may raise, and warnings given once each."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counters = StoreCounters()
        self._warned: set[str] = set()

    def add(self, **more: int) -> None:
        """Raise counters by these numbers; names are ``StoreCounters``' fields."""
        with self._lock:
            now = self._counters
            self._counters = replace(
                now, **{name: getattr(now, name) + n for name, n in more.items()}
            )

    def warn(self, kind: str, message: object) -> None:
        """Log a warning, the first of its kind only: a dead backend fails often."""
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            logger.warning(
                "store: %s: %s (further ones are only counted)", kind, message
            )

    def unreadable(self, what: str, error: StoreError) -> None:
        """Count and report an object that was read in vain.

        Args:
            what: "record", or its part.
            error: Why.
        """
        damaged = error.differs in DAMAGE
        self.add(checksum_failures=int(damaged), foreign=int(not damaged))
        self.warn(f"{what} of a segment is unreadable", error)

    def snapshot(self) -> StoreCounters:
        """Return the totals now."""
        with self._lock:
            return self._counters


COUNTERS = tuple(entry.name for entry in fields(StoreCounters))
"""Names of the counters, for metrics."""
