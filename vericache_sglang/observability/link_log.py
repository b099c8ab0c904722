"""Log of recent copies over the host link, and its throughput."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Literal, Protocol

from vericache_sglang.observability.record import TransferRecord

if TYPE_CHECKING:
    from vericache_sglang.scheduling.link import LinkEstimate

KEPT = 256
"""Most records kept for the sinks."""

RECENT = 32
"""Copies per direction over which the throughput is averaged."""


class EndedCopy(Protocol):
    """A copy over the host link that has ended."""

    @property
    def nbytes(self) -> int:
        """Bytes copied."""

    @property
    def seconds(self) -> float:
        """Duration, in seconds."""


class LinkLog:
    """Updates the link estimate and keeps the last records.

    Args:
        estimate: Bandwidth estimate to update.
    """

    def __init__(self, estimate: LinkEstimate) -> None:
        self._estimate = estimate
        self._records: deque[TransferRecord] = deque(maxlen=KEPT)
        self._recent: dict[str, deque[tuple[int, float]]] = {
            direction: deque(maxlen=RECENT) for direction in ("in", "out")
        }

    def note(
        self, rid: str, direction: Literal["in", "out"], transfer: EndedCopy
    ) -> None:
        """Record a copy that has just ended."""
        self._estimate.observe(transfer.nbytes, transfer.seconds, direction)
        self._recent[direction].append((transfer.nbytes, transfer.seconds))
        now = time.perf_counter()
        self._records.append(
            TransferRecord(rid, direction, transfer.nbytes, now, transfer.seconds)
        )

    def rate(self, direction: Literal["in", "out"]) -> float:
        """Return the throughput of the last copies, in bytes/s; 0.0 without copies."""
        recent = self._recent[direction]
        seconds = sum(each for _, each in recent)
        return sum(nbytes for nbytes, _ in recent) / seconds if seconds else 0.0

    def drain(self) -> tuple[TransferRecord, ...]:
        """Return the copies that ended since the last call."""
        ended = tuple(self._records)
        self._records.clear()
        return ended
