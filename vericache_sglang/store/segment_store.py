"""Segments in a store: put, get, look up, upgrade, copy; now or in the background."""

from __future__ import annotations

import time
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from vericache_sglang.errors import InvariantError, StoreError, VeriCacheError
from vericache_sglang.store.background import Background
from vericache_sglang.store.frame import digest_of
from vericache_sglang.store.keys import compressor_key
from vericache_sglang.store.pace import Pace
from vericache_sglang.store.payload import Expect, Label, decode, encode, pair_of
from vericache_sglang.store.presence import Presence, alone, paired, restorable
from vericache_sglang.store.record_log import RecordLog
from vericache_sglang.store.records import (
    MOST_OBJECT_BYTES,
    Record,
    Stored,
    held,
    object_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import Future
    from typing import TypeAlias

    from vericache_sglang.store.backend import Backend
    from vericache_sglang.store.keys import Fingerprint
    from vericache_sglang.store.payload import About, Part, Payload, Tensors
    from vericache_sglang.store.records import Held
    from vericache_sglang.store.tally import StoreCounters

    Split: TypeAlias = Callable[[Mapping[Part, Payload]], tuple[Tensors, Tensors]]

ResultT = TypeVar("ResultT")

MOST_SALTS = 8
"""Times an object found damaged is written anew, each time under another key."""


class SegmentStore:
    """What a store has of the segments of one model. Thread-safe.

    Nothing here raises because of the store or its backend: what cannot be read is
    missing, what cannot be written is dropped, and both are counted. An object is
    named by its content and announced by a record that is written last, so readers
    see whole segments only, whoever writes at the same time. The interface of HiCache
    has no delete: what is replaced stays until the backend evicts it.

    With several ranks each has a store of its own (the rank is in the fingerprint);
    they must agree on the least of their ``lookup``.

    Args:
        backend: Where the bytes are; its ``tally`` becomes the store's.
        fingerprint: Whose KV. After new weights: a new store.
        most_waiting: Segments that ``put_later`` may hold; as many prefetches.

    Attributes:
        pace: How fast ``restore`` reads.
    """

    def __init__(
        self, backend: Backend, fingerprint: Fingerprint, most_waiting: int = 64
    ) -> None:
        self.fingerprint = fingerprint
        self.pace = Pace()
        self._backend = backend
        self._tally = backend.tally
        self._short = fingerprint.short
        self._log = RecordLog(backend, self._short)
        self._lock = Lock()
        self._unusable: set[str] = set()
        self._presence = Presence(backend, self._log, self._short, self._unusable)
        self._writer = Background("store-writer", most_waiting)
        self._reader = Background("store-reader", most_waiting)

    def put(self, name: str, parts: Mapping[Part, Tensors], about: About) -> bool:
        """Store parts of a segment; they become readable together.

        Nothing is written where such parts are there already: KV of the same tokens
        differs in rounding at most. One found damaged by this process does not count.

        Args:
            name: The segment's name.
            parts: ``whole`` alone, or ``draft`` and ``rest`` of one split. Never store
                as ``whole`` what was restored from a lossy part.
            about: What the segment stands for. Its compressor is empty for ``whole``
                and for nothing else.

        Returns:
            It is readable now, or was before.

        Raises:
            StoreError: tensor: one that cannot be stored, see ``encode``.
            InvariantError: No parts, ``whole`` beside others or with a compressor, or
                other parts without.
        """
        whole = "whole" in parts
        if not parts or (whole and len(parts) > 1) or whole == bool(about.compressor):
            raise InvariantError(
                f"parts {sorted(parts)} packed by {about.compressor!r} of {name}"
            )
        if self._has(name, parts, about):
            return True
        pair = "" if whole else pair_of(parts)
        return self._write(
            [(Label(name, part, pair, about), parts[part]) for part in sorted(parts)]
        )

    def put_later(
        self, name: str, parts: Mapping[Part, Tensors], about: About
    ) -> Future[bool] | None:
        """``put`` in the writer's thread.

        Args:
            name: See ``put``.
            parts: See ``put``; not copied: must not change until the future is done.
            about: See ``put``.

        Returns:
            What ``put`` will return or raise. None: the queue is full, it is dropped.
        """
        future = self._writer.submit(lambda: self._put_reporting(name, parts, about))
        if future is None:
            self._tally.add(dropped_writes=1)
        return future

    def accept(self, payload: Payload) -> bool:
        """Store one object that another store returned, in its pair; see ``put``."""
        return self._write([(payload.label, payload.tensors)])

    def get(
        self, name: str, part: Part, compressor: str = "", pair: str | None = None
    ) -> Payload | None:
        """Read one part of a segment, every byte checked.

        Args:
            name: The segment's name.
            part: Which part.
            compressor: ``compressor_identity``; empty for ``whole``.
            pair: For the second part of a segment the ``label.pair`` of the first:
                parts of different splits must never be joined. None: of any.

        Returns:
            The newest intact one; None: a miss.
        """
        key = compressor_key(compressor)
        for (packer, split), parts in self._held(name).items():
            if packer == key and pair in (None, split):
                expect = Expect(self.fingerprint, name, part, compressor, split)
                payload = self._read_any(parts.get(part, []), expect)
                if payload is not None:
                    return payload
        self._tally.add(misses=1)
        return None

    def restore(self, name: str, *compressors: str) -> dict[Part, Payload] | None:
        """Read all that a segment's KV can be made from, every byte checked.

        Args:
            name: The segment's name.
            compressors: What of several to take first, in this order: their draft
                parts and rests; the whole segment where there is none, or for "".

        Returns:
            ``whole``, or ``draft`` and ``rest`` of one split by the compressor of their
            ``label.about``. None: a miss.
        """
        began, held_now = time.perf_counter(), self._held(name)
        keys = [*map(compressor_key, compressors), ""]
        order = {key: place for place, key in reversed(list(enumerate(keys)))}
        last = len(keys)
        for packer, pair in sorted(held_now, key=lambda held: order.get(held[0], last)):
            wanted: tuple[Part, ...] = ("draft", "rest") if packer else ("whole",)
            found: dict[Part, Payload] = {}
            for part in wanted:
                expect = Expect(self.fingerprint, name, part, None, pair)
                objects = held_now[packer, pair].get(part, [])
                payload = self._read_any(objects, expect)
                if payload is None:
                    break
                found[part] = payload
            else:
                tensors = [each.tensors.values() for each in found.values()]
                nbytes = sum(tensor.nbytes for each in tensors for tensor in each)
                self.pace.note_read(nbytes, time.perf_counter() - began)
                return found
        self._tally.add(misses=1)
        return None

    def exists(self, name: str, part: Part, compressor: str = "") -> bool:
        """Say whether a part seems to be there; its content is not looked at."""
        key = compressor_key(compressor)
        return self._presence.run([name], lambda found: alone(found, part, key)) == 1

    def lookup(self, names: Sequence[str]) -> int:
        """Count the segments, from the first on, that can be restored whole.

        Args:
            names: Names of a prompt's segments, see ``segment_names``.

        Returns:
            Length of the longest run that is stored whole, or as draft part and rest of
            one split of any compressor.
        """
        return self._presence.run(names, restorable)

    def lookup_compressed(self, names: Sequence[str], compressor: str) -> int:
        """Count the segments, from the first on, whose draft part is stored.

        Args:
            names: See ``lookup``.
            compressor: ``compressor_identity``.
        """
        key = compressor_key(compressor)
        return self._presence.run(names, lambda found: alone(found, "draft", key))

    def prefetch(
        self, names: Sequence[str], read: Callable[[str], ResultT | None]
    ) -> Future[list[ResultT]] | None:
        """Read segments in the reader's thread, up to the first that is missing.

        Args:
            names: See ``lookup``.
            read: ``restore``, or another that reads one segment by its name.

        Returns:
            What ``read`` returns of each, to come; after the first None there is no
            more. None: too many prefetches wait.
        """

        def read_all() -> list[ResultT]:
            found = []
            for name in names:
                one = read(name)
                if one is None:
                    break
                found.append(one)
            return found

        return self._reader.submit(read_all)

    def compress(self, names: Sequence[str], split: Split, compressor: str) -> int:
        """Upgrade stored segments to the draft part and the rest of a compressor.

        Until both new parts are there, and for ever where that fails, readers see what
        was stored before.

        Args:
            names: Segments; those that are not stored are passed over.
            split: Makes (draft, rest) from ``{"whole": ...}`` or, where no whole one is
                stored, from ``draft`` and ``rest`` of another compressor, see
                ``Payload.label.about``. What it raises is passed on.
            compressor: ``compressor_identity`` of what ``split`` makes.

        Returns:
            Segments that have both parts now.
        """
        return sum(self._compress_one(name, split, compressor) for name in names)

    def counters(self) -> StoreCounters:
        """Return the totals now."""
        return self._tally.snapshot()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits to be written; False where that took too long."""
        return self._writer.drain(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write what waits and take no more; False where that took too long."""
        self._reader.close(0.0)
        return self._writer.close(timeout_s)

    def _put_reporting(
        self, name: str, parts: Mapping[Part, Tensors], about: About
    ) -> bool:
        try:
            return self.put(name, parts, about)
        except VeriCacheError as error:  # nobody may ever look at the future
            self._tally.add(dropped_writes=1)
            self._tally.warn("a segment cannot be stored", error)
            raise

    def _write(self, objects: Sequence[tuple[Label, Tensors]]) -> bool:
        began, label = time.perf_counter(), objects[0][0]
        written = [self._write_object(each, tensors) for each, tensors in objects]
        stored = tuple(each for each in written if each is not None)
        record = Record(compressor_key(label.about.compressor), label.pair, stored)
        if len(stored) == len(objects) and self._log.append(label.name, record):
            nbytes = sum(each.nbytes for each in stored)
            self.pace.note_write(nbytes, time.perf_counter() - began)
            return True
        self._tally.add(dropped_writes=1)
        return False

    def _write_object(self, label: Label, tensors: Tensors) -> Stored | None:
        data = encode(self.fingerprint, label, tensors)
        if data.numel() > MOST_OBJECT_BYTES:
            return None
        for salt in range(MOST_SALTS):
            stored = Stored(label.part, data.numel(), digest_of(data), salt)
            key = object_key(self._short, label.name, stored)
            if key in self._unusable:
                continue
            # One without a record, of a writer that died or whose record is damaged:
            # nobody has looked at it yet, and a write-once backend would keep it.
            there = self._backend.read([key], stored.nbytes)[0]
            if there is not None:
                if there.equal(data):
                    return stored
                self._mark_unusable(key)
                continue
            if not self._backend.write(key, data):
                return None
            self._tally.add(written_bytes=stored.nbytes)
            return stored
        return None

    def _compress_one(self, name: str, split: Split, compressor: str) -> bool:
        key = compressor_key(compressor)
        if self._presence.run([name], lambda found: paired(found, key)) == 1:
            return True
        source = self.restore(name)
        if source is None:
            return False
        about = next(iter(source.values())).label.about
        draft, rest = split(source)
        parts: dict[Part, Tensors] = {"draft": draft, "rest": rest}
        return self.put(name, parts, replace(about, compressor=compressor))

    def _has(self, name: str, parts: Collection[Part], about: About) -> bool:
        key = compressor_key(about.compressor)

        def same(found: Held) -> list[tuple[Stored, ...]]:
            lone = [alone(found, part, key) for part in parts]
            return lone[0] if len(lone) == 1 else paired(found, key)

        return self._presence.run([name], same) == 1

    def _held(self, name: str) -> Held:
        # Fresh: what is remembered may have been evicted; and a backend that evicts
        # what was not read for long must see that the records are read.
        return held(self._log.read([name], fresh=True)[0])

    def _mark_unusable(self, key: str) -> None:
        with self._lock:
            self._unusable.add(key)

    def _read_any(self, objects: Sequence[Stored], expect: Expect) -> Payload | None:
        for stored in objects:
            key = object_key(self._short, expect.name, stored)
            if key in self._unusable:
                continue
            buffer = self._backend.read([key], stored.nbytes)[0]
            if buffer is None:
                continue
            try:
                payload = decode(buffer, expect)
            except StoreError as error:
                self._tally.unreadable(expect.part, error)
                self._mark_unusable(key)
                continue
            self._tally.add(hits=1, read_bytes=stored.nbytes)
            return payload
        return None


def move(
    name: str,
    part: Part,
    source: SegmentStore,
    target: SegmentStore,
    compressor: str = "",
) -> bool:
    """Copy one part of a segment to another store, as it is, through this machine.

    The source keeps its own: HiCache's interface has no delete. A draft part whose rest
    is moved later joins it then: both keep their pair.

    Args:
        name: The segment's name.
        part: Which part.
        source: Where it is.
        target: Where it shall be.
        compressor: ``compressor_identity``; empty for ``whole``.

    Returns:
        It is in the target now.

    Raises:
        InvariantError: The stores are of different models or ranks.
    """
    if source.fingerprint != target.fingerprint:
        raise InvariantError(f"{source.fingerprint} is not {target.fingerprint}")
    payload = source.get(name, part, compressor)
    return payload is not None and target.accept(payload)
