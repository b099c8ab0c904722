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
"""A request waits for the store this long; what has not come is prefilled."""
AHEAD_BYTES = 256 << 20
"""Most bytes read ahead for a request, before they are taken in."""
MOST_FETCHES = 4096
"""Requests that are fetched for at once; beyond it the oldest goes on without."""
MOST_KNOWN = 65_536
"""Segments known to be in the store, the last ones: 33 million tokens."""


@dataclass(slots=True)
class Fetch:
    """What is read from the store for a waiting request.

    Attributes:
        names: Segments to come.
        parent: Name of the one before them, None at the beginning.
        start: First token that was asked for.
        deadline: When the request goes on without it, in ``time.monotonic`` seconds.
        reading: The first of ``names``; None once nothing more will be taken in.
        tokens: Tokens that were taken in.
    """

    names: Sequence[str]
    parent: str | None
    start: int
    deadline: float
    reading: StoreFetch | None
    tokens: int = 0


class StoredSegments:
    """Writes segments to the store once, and reads them for requests that wait.

    One thread calls it, the scheduler's; only ``close`` waits for the store. Ranks that
    share a prompt call ``found``, agree on the smallest answer, and ``take`` as many.

    Args:
        store: Where they are kept.
        compressor: Identity of what this server's draft KV is chosen by.
        keep: Takes a segment in: name, the one before it, what was stored; returns
            whether it found room.
        better: Compressors whose draft KV, where it is stored, is taken instead.
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
        # By name, whether it is there in two parts; what is being written likewise.
        self._there: Recent[bool] = Recent(MOST_KNOWN)
        self._writing: dict[str, tuple[bool, Future[bool]]] = {}
        self._changes: deque[tuple[str, bool]] = deque(maxlen=MOST_KNOWN)

    # -- what the store has ---------------------------------------------------

    def __contains__(self, name: object) -> bool:
        """Return whether the store has a segment, as of the last ``changes``."""
        return name in self._there

    def changes(self) -> list[tuple[str, bool]]:
        """Return what changed since the last call: names, and whether it has them."""
        self._end_writes()
        found = list(self._changes)
        self._changes.clear()
        return found

    def forget(self, name: str) -> None:
        """Forget that the store has a segment; it keeps what it has."""
        self._there.pop(name, None)
        self._writing.pop(name, None)

    @property
    def s_per_byte(self) -> float:
        """Seconds per byte of a fetch, as measured; ``inf`` before the first one."""
        return self._store.pace.s_per_byte

    # -- writing --------------------------------------------------------------

    def wants(self, name: str, split: bool = False) -> bool:
        """Return whether a segment is not in the store, as far as is known.

        Args:
            name: The segment.
            split: In two parts; False: in any form.
        """
        forms = (self._there.get(name), *self._writing.get(name, ())[:1])
        return True not in forms and (split or False not in forms)

    def write(self, name: str, parts: Mapping[Part, Tensors]) -> None:
        """Write a segment, whole or in two parts, which must not change any more."""
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
        """Begin to read what follows the tokens that need no store.

        Args:
            rid: Request that waits.
            names: Of its prompt's whole segments.
            start: Tokens of it that are cached already.
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
        """Return how many segments could be taken in for a request now.

        Returns:
            Leading segments that were read; None while more may come in time. 0 where
            nothing more will.
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
        """Take in segments that were found; never raises for what they hold.

        Args:
            rid: Request that waits.
            count: Leading segments to take, at most ``found``.

        Returns:
            The request need not wait any longer; otherwise more is being read.
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
        """Return whether these are two parts as this server makes them, or better."""
        return found.manifest.compressor in self._usable

    def pop(self, rid: str) -> tuple[int, int | None]:
        """Forget a fetch; return the tokens it brought, and where they begin."""
        fetch = self._fetches.pop(rid, None)
        if fetch is not None and fetch.reading is not None:
            fetch.reading.cancelled = True
        if fetch is None or not fetch.tokens:
            return 0, None
        return fetch.tokens, fetch.start

    def close(self) -> None:
        """Write what waits, and take no more."""
        self._store.close()

    def report(self) -> dict[str, int]:
        """Return the store's counters, by their names in the worker's report."""
        return self._store.counters.report(self._store.waiting)

    def _read(self, names: Sequence[str]) -> StoreFetch:
        return self._store.prefetch(names[: self._ahead], self._usable)

    def _take_in(self, name: str, parent: str | None, found: Found) -> bool:
        """Take a segment in; False where that failed or there is no room."""
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
