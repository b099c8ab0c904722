"""Counters and once-only warnings of the store."""

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
        hits: Objects that were read intact.
        misses: Segments that were requested and not found.
        read_bytes: Bytes of objects read intact.
        written_bytes: Bytes of objects that the backend accepted.
        written_draft_bytes: Those of draft KV among them.
        damaged: Corrupt, truncated or unusable objects and manifests.
        foreign: Intact manifests of another segment or model.
        dropped_writes: Segments not stored: the queue was full, or the backend refused.
        failed_calls: Calls of the backend that raised or timed out.
        refused_calls: Calls not made because preceding ones failed.
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    written_draft_bytes: int = 0
    damaged: int = 0
    foreign: int = 0
    dropped_writes: int = 0
    failed_calls: int = 0
    refused_calls: int = 0
    _warned: set[str] = field(default_factory=set, repr=False, compare=False)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, **more: int) -> None:
        """Add these numbers to the counters."""
        with self._lock:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)

    def warn(self, kind: str, message: object) -> None:
        """Log the first warning of each kind, as a dead backend fails often."""
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            logger.warning(
                "store: %s: %s (further ones are only counted)", kind, message
            )

    def note_unreadable(self, what: str, error: StoreError) -> None:
        """Count and report an unreadable object or manifest."""
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
