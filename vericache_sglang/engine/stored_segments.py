"""Cached segments in the store: written behind the server's back, fetched for it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vericache_sglang.memory.segments import SEGMENT
from vericache_sglang.store.keys import root_name
from vericache_sglang.store.payload import About

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from vericache_sglang.store.keys import Fingerprint
    from vericache_sglang.store.payload import Part, Payload, Tensors
    from vericache_sglang.store.segment_store import SegmentStore
    from vericache_sglang.store.tally import StoreCounters

    Namespace = tuple[str | None, ...]
    Tokens = Sequence[int] | array[int]
    Found = Mapping[Part, Payload]

WHOLE, SPLIT = "whole", "split"
"""Forms in which a segment is stored: as it is, or in this server's two parts."""

LONGEST_S = 5.0
"""A request waits for the store this long, then it is prefilled."""


@dataclass(slots=True)
class Fetch:
    """What is read from the store for a waiting request.

    Attributes:
        names: Segments asked for.
        parent: Name of the one before them, None at the beginning.
        start: First token of the first of them.
        future: What was found, up to the first that is missing.
        deadline: When the request goes on without it, in ``time.monotonic`` seconds.
        tokens: Tokens that came, once it is over.
    """

    names: Sequence[str]
    parent: str | None
    start: int
    future: Future[list[Found]] | None
    deadline: float
    tokens: int = 0


class StoredSegments:
    """Writes segments to the store once, and reads them for requests that wait.

    Args:
        store: Where they are kept.
        compressor: Of the draft parts this server can use.
        keep: Takes a segment in: name, the one before it, what was stored; says whether
            it found room.
        better: Compressors whose parts, where somebody stored them, are taken instead.
    """

    def __init__(
        self,
        store: SegmentStore,
        compressor: str,
        keep: Callable[[str, str | None, Found], bool],
        better: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._compressor = compressor
        self._usable = (*better, compressor)
        self._keep = keep
        self._about: dict[str, About] = {}
        self._written: dict[str, str] = {}
        self._fetches: dict[str, Fetch] = {}
        self._writes: set[Future[bool]] = set()
        self._there: set[str] = set()
        # Names, and whether the store has them; the writer's thread adds to it.
        self._news: deque[tuple[str, bool]] = deque()

    # -- what the store has ---------------------------------------------------

    def __contains__(self, name: object) -> bool:
        """Say whether the store announced a segment, as of the last ``news``."""
        return name in self._there

    def news(self) -> list[tuple[str, bool]]:
        """Return what changed since the last call: names, and whether it has them."""
        found = []
        while self._news:
            name, there = self._news.popleft()
            (self._there.add if there else self._there.discard)(name)
            found.append((name, there))
        return found

    @property
    def s_per_byte(self) -> float:
        """Seconds per byte of a fetch, as measured; ``inf`` before the first one."""
        return self._store.pace.s_per_byte

    # -- writing --------------------------------------------------------------

    def describe(
        self, names: Sequence[str], namespace: Namespace, tokens: Tokens
    ) -> None:
        """Note what segments stand for, so that they can be written later.

        Args:
            names: Of a text's whole segments, from its beginning.
            namespace: What requests must have in common to share KV.
            tokens: Token ids from the beginning.
        """
        for at, name in enumerate(names):
            if name in self._about:
                continue
            before = names[at - 1] if at else root_name(self._model, namespace)
            own = tuple(tokens[at * SEGMENT : (at + 1) * SEGMENT])
            self._about[name] = About(own, before, namespace)

    def forget(self, name: str) -> None:
        """Forget what a segment stands for; the store keeps what it has."""
        self._about.pop(name, None)
        self._written.pop(name, None)
        self._there.discard(name)

    def leave(self, name: str) -> None:
        """Forget what a segment stands for that the store alone has from now on."""
        self._about.pop(name, None)

    def wants(self, name: str) -> bool:
        """Say whether a segment could be written and was not, in no form."""
        return name in self._about and name not in self._written

    def wants_split(self, name: str) -> bool:
        """Say whether a segment's two parts could be written and were not."""
        return name in self._about and self._written.get(name) != SPLIT

    def write_whole(self, name: str, tensors: Tensors) -> None:
        """Write a whole segment; ``tensors`` must not change any more."""
        self._write(name, {"whole": tensors}, self._about[name])

    def write_split(self, name: str, draft: Tensors, rest: Tensors) -> None:
        """Write a segment's two parts; the tensors must not change any more."""
        about = self._about[name]
        about = About(about.tokens, about.parent, about.namespace, self._compressor)
        self._write(name, {"draft": draft, "rest": rest}, about)

    def _write(self, name: str, parts: Mapping[Part, Tensors], about: About) -> None:
        future = self._store.put_later(name, parts, about)
        if future is not None:
            self._written[name] = SPLIT if about.compressor else WHOLE
            self._writes.add(future)
            future.add_done_callback(partial(self._settle, name))

    def _settle(self, name: str, future: Future[bool]) -> None:
        """Have a segment written again that could not be; in the writer's thread."""
        self._writes.discard(future)
        if future.cancelled() or future.exception() or not future.result():
            self._written.pop(name, None)
        elif name in self._written:
            self._news.append((name, True))

    @property
    def _model(self) -> Fingerprint:
        return self._store.fingerprint

    # -- reading --------------------------------------------------------------

    def fetch(self, rid: str, names: Sequence[str], start: int) -> None:
        """Begin to read what follows a part that needs no store.

        Args:
            rid: Request that waits.
            names: Of its prompt's whole segments.
            start: Tokens of it that are there already.
        """
        first = start // SEGMENT
        wanted = names[first:]
        if not wanted or rid in self._fetches:
            return
        self._fetches[rid] = Fetch(
            names=wanted,
            parent=names[first - 1] if first else None,
            start=first * SEGMENT,
            future=self._store.prefetch(wanted, self._read),
            deadline=time.monotonic() + LONGEST_S,
        )

    def fetched(self, rid: str) -> bool:
        """Say whether a request need not wait any longer; takes in what has come."""
        fetch = self._fetches.get(rid)
        if fetch is None or fetch.future is None:
            return True
        if not fetch.future.done():
            return time.monotonic() > fetch.deadline
        future, fetch.future = fetch.future, None
        failed = future.cancelled() or future.exception()
        found = [] if failed else future.result()
        parent = fetch.parent
        for name in fetch.names[len(found) :]:
            self._written.pop(name, None)
        if not failed and len(found) < len(fetch.names):
            self._news.append((fetch.names[len(found)], False))  # the rest is unknown
        for name, parts in zip(fetch.names, found, strict=False):
            self._written[name] = SPLIT if self.usable(parts) else WHOLE
            self._news.append((name, True))
            if not self._keep(name, parent, parts):
                break
            fetch.tokens += SEGMENT
            parent = name
        return True

    def usable(self, found: Found) -> bool:
        """Say whether these are two parts as this server makes them, or better ones."""
        draft = found.get("draft")
        return draft is not None and draft.label.about.compressor in self._usable

    def _read(self, name: str) -> Found | None:
        return self._store.restore(name, *self._usable)

    def pop(self, rid: str) -> tuple[int, int | None]:
        """Forget a fetch; return the tokens it brought, and where they begin."""
        fetch = self._fetches.pop(rid, None)
        if fetch is None or not fetch.tokens:
            return 0, None
        return fetch.tokens, fetch.start

    def close(self) -> None:
        """Write what waits, and take no more."""
        self._store.close()

    def report(self) -> dict[str, int]:
        """Return the store's counters."""
        return store_report(self._store.counters(), len(self._writes))


def store_report(counters: StoreCounters, waiting: int = 0) -> dict[str, int]:
    """Return a store's counters, and segments that wait to be written.

    The names are those of the worker's report.
    """
    return {
        "cache_store_waiting": waiting,
        "cache_store_hits": counters.hits,
        "cache_store_misses": counters.misses,
        "cache_store_read_bytes": counters.read_bytes,
        "cache_store_written_bytes": counters.written_bytes,
        "cache_store_damaged": counters.checksum_failures,
        "cache_store_foreign": counters.foreign,
        "cache_store_failed_calls": counters.failed_calls,
        "cache_store_refused_calls": counters.refused_calls,
        "cache_store_dropped_writes": counters.dropped_writes,
    }
