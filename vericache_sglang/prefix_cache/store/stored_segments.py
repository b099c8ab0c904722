"""Cached segments in the store: written in the background, fetched for requests."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.store.manifest import Recent
from vericache_sglang.prefix_cache.store.objects import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from vericache_sglang.prefix_cache.store.objects import Part, Tensors
    from vericache_sglang.prefix_cache.store.segment_store import (
        Found,
        SegmentStore,
        StoreFetch,
    )

logger = logging.getLogger(__name__)

LONGEST_S = 5.0
"""Most seconds a request waits for the store; missing tokens are then prefilled."""
AHEAD_BYTES = 256 << 20
"""Most bytes read ahead for a request before they are copied to the host tier."""
MOST_FETCHES = 4096
"""Most concurrent fetches; a further one cancels the oldest."""
MOST_KNOWN = 65_536
"""Most segments remembered as stored, the latest ones: 33 million tokens."""


@dataclass(slots=True)
class Fetch:
    """A fetch from the store for a waiting request.

    Attributes:
        names: Segments still to fetch.
        parent: Name of the segment before them; None at the start of the prompt.
        start: Position of the first requested token.
        deadline: End of the wait, in ``time.monotonic`` seconds.
        reading: The read of the first of ``names``; None when the fetch has ended.
        tokens: Tokens copied to the host tier so far.
    """

    names: Sequence[str]
    parent: str | None
    start: int
    deadline: float
    reading: StoreFetch | None
    tokens: int = 0


class StoredSegments:
    """Writes segments to the store once, and reads them for waiting requests.

    Only the scheduler's thread may call it; only ``close`` waits for the store. Ranks
    that share a prompt call ``found``, take the minimum over ranks, and ``take`` as
    many.

    Args:
        store: The store.
        compressor: Identity of the compressor of this server's draft KV.
        keep: Copies a segment to the host tier, given its name, its parent and the
            parts found; returns False without free host pages.
        better: Compressors whose stored draft KV is preferred to this server's.
        segment: Tokens of a segment.
    """

    def __init__(
        self,
        store: SegmentStore,
        compressor: str,
        keep: Callable[[str, str | None, Found], bool],
        better: Sequence[str] = (),
        segment: int = SEGMENT,
    ) -> None:
        self._store = store
        self._compressor = compressor
        self._usable = (*better, compressor)
        self._keep = keep
        self._segment = segment
        fields = layout(store.fingerprint, "whole", segment, 0).values()
        self._ahead = max(1, AHEAD_BYTES // sum(field.nbytes for field in fields))
        self._fetches: dict[str, Fetch] = {}
        # Name -> whether it is stored in two parts; the same for pending writes.
        self._there: Recent[bool] = Recent(MOST_KNOWN)
        self._writing: dict[str, tuple[bool, Future[bool]]] = {}
        self._changes: deque[tuple[str, bool]] = deque(maxlen=MOST_KNOWN)

    # -- contents of the store ------------------------------------------------

    def __contains__(self, name: object) -> bool:
        """Return whether the store has a segment, as of the last ``changes``."""
        return name in self._there

    def changes(self) -> list[tuple[str, bool]]:
        """Return changes since the last call: names, and whether the store has them."""
        self._end_writes()
        found = list(self._changes)
        self._changes.clear()
        return found

    def forget(self, name: str) -> None:
        """Forget that the store has a segment; nothing is deleted from the store."""
        self._there.pop(name, None)
        self._writing.pop(name, None)

    @property
    def s_per_byte(self) -> float:
        """Measured seconds per byte of a fetch; ``inf`` before the first one."""
        return self._store.pace.s_per_byte

    # -- writing --------------------------------------------------------------

    def wants(self, name: str, split: bool = False) -> bool:
        """Return whether the store is not known to have a segment.

        Args:
            name: The segment.
            split: Require draft KV and residual KV; False: any form counts.
        """
        forms = (self._there.get(name), *self._writing.get(name, ())[:1])
        return True not in forms and (split or False not in forms)

    def write(self, name: str, parts: Mapping[Part, Tensors]) -> None:
        """Queue a write of a segment; ``parts`` must not change afterwards."""
        self._end_writes()
        split = "whole" not in parts
        compressor = self._compressor if split else ""
        future = self._store.put_later(name, parts, compressor)
        if future is not None:
            self._writing[name] = split, future

    def _end_writes(self) -> None:
        for name, (split, future) in list(self._writing.items()):
            if future.done():
                del self._writing[name]
                if not future.cancelled() and future.result():
                    self._note(name, split)

    def _note(self, name: str, split: bool) -> None:
        self._there[name] = split
        self._changes.append((name, True))

    # -- reading --------------------------------------------------------------

    def fetch(self, rid: str, names: Sequence[str], start: int) -> None:
        """Start to read the segments that follow the cached tokens of a prompt.

        Args:
            rid: Waiting request.
            names: Names of its prompt's whole segments.
            start: Tokens of the prompt that are already cached.
        """
        first = start // self._segment
        if first >= len(names) or rid in self._fetches:
            return
        if len(self._fetches) >= MOST_FETCHES:
            self.pop(next(iter(self._fetches)))
        self._fetches[rid] = Fetch(
            names=names[first:],
            parent=names[first - 1] if first else None,
            start=first * self._segment,
            deadline=time.monotonic() + LONGEST_S,
            reading=self._read(names[first:]),
        )

    def found(self, rid: str) -> int | None:
        """Return how many segments ``take`` can copy for a request now.

        Returns:
            Number of leading segments that were read; None while more may arrive before
            the deadline; 0 when the fetch has ended.
        """
        fetch = self._fetches.get(rid)
        if fetch is None or fetch.reading is None:
            return 0
        if not fetch.reading.done:
            if time.monotonic() < fetch.deadline:
                return None
            fetch.reading.cancelled = True
        return len(fetch.reading.found)

    def take(self, rid: str, count: int) -> bool:
        """Copy found segments to the host tier; invalid content does not raise.

        Args:
            rid: Waiting request.
            count: Leading segments to copy, at most ``found``.

        Returns:
            True if the request no longer has to wait; False while more is being read.
        """
        fetch = self._fetches.get(rid)
        if fetch is None or fetch.reading is None:
            return True
        reading, fetch.reading = fetch.reading, None
        reading.cancelled = True
        for name, found in zip(reading.names[:count], reading.found, strict=False):
            if not self._take_in(name, fetch.parent, found):
                return True
            fetch.tokens += self._segment
            fetch.parent = name
        fetch.names = fetch.names[count:]
        if count < len(reading.names):
            self._changes.append((fetch.names[0], False))
            for name in fetch.names:
                self._there.pop(name, None)
        elif fetch.names:
            fetch.reading = self._read(fetch.names)
        return fetch.reading is None

    def usable(self, found: Found) -> bool:
        """Return whether a compressor that this server accepts made the parts."""
        return found.manifest.compressor in self._usable

    def pop(self, rid: str) -> tuple[int, int | None]:
        """End a fetch; return the number of tokens fetched, and where they begin."""
        fetch = self._fetches.pop(rid, None)
        if fetch is not None and fetch.reading is not None:
            fetch.reading.cancelled = True
        if fetch is None or not fetch.tokens:
            return 0, None
        return fetch.tokens, fetch.start

    def close(self) -> None:
        """Complete queued writes, and refuse further ones."""
        self._store.close()

    def report(self) -> dict[str, int]:
        """Return the store's counters, by their names in the worker's report."""
        return self._store.counters.report(self._store.waiting)

    def _read(self, names: Sequence[str]) -> StoreFetch:
        return self._store.prefetch(names[: self._ahead], self._usable)

    def _take_in(self, name: str, parent: str | None, found: Found) -> bool:
        """Copy a segment to the host tier; False on a failure or without free pages."""
        try:
            if found.manifest.tokens != self._segment:
                raise ValueError(f"of {found.manifest.tokens} tokens")
            kept = self._keep(name, parent, found)
        except Exception as error:
            logger.exception("VeriCache: a stored segment cannot be used: %s", error)
            self._store.refuse(found)
            self._there.pop(name, None)
            return False
        self._note(name, self.usable(found))
        return kept
