"""Counters of the store, and warnings that were given."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_sglang.errors import StoreError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StoreCounters:
    """Totals since the store was opened; any thread adds to them.

    Attributes:
        hits: Objects that were read.
        misses: Segments that were asked for and not found.
        read_bytes: Bytes of objects read and found intact.
        written_bytes: Bytes of objects handed to the backend and taken.
        damaged: Objects and manifests that are not what a writer of ours wrote.
        foreign: Intact manifests of another segment or model.
        dropped_writes: Segments not stored: the queue was full, or the backend refused.
        failed_calls: Calls of the backend that raised or took too long.
        refused_calls: Calls not made, because the ones before them failed.
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    damaged: int = 0
    foreign: int = 0
    dropped_writes: int = 0
    failed_calls: int = 0
    refused_calls: int = 0
    _warned: set[str] = field(default_factory=set, repr=False, compare=False)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, **more: int) -> None:
        """Raise counters by these numbers."""
        with self._lock:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)

    def warn(self, kind: str, message: object) -> None:
        """Log a warning, the first of its kind only: a dead backend fails often."""
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            logger.warning(
                "store: %s: %s (further ones are only counted)", kind, message
            )

    def note_unreadable(self, what: str, error: StoreError) -> None:
        """Count and report an object, or "manifest", that was read in vain."""
        foreign = error.differs == "name"
        self.add(damaged=int(not foreign), foreign=int(foreign))
        self.warn(f"{what} of a segment is unreadable", error)

    def report(self, waiting: int = 0) -> dict[str, int]:
        """Return the counters by their names in the worker's report.

        Args:
            waiting: Segments that wait to be written.
        """
        names = [each.name for each in fields(self) if each.name[0] != "_"]
        counted = {f"cache_store_{name}": getattr(self, name) for name in names}
        return {"cache_store_waiting": waiting, **counted}
