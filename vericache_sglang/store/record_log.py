"""Reads and appends the records of segments; remembers those it read."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

from vericache_sglang.errors import StoreError
from vericache_sglang.store.records import (
    MOST_RECORDS,
    RECORD_BYTES,
    Record,
    decode_record,
    encode_record,
    record_key,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from vericache_sglang.store.backend import Backend

REMEMBERED = 16_384
"""Segments whose records are remembered: 8 million tokens, some 16 MB."""


class RecordLog:
    """Per segment a list of records that only grows. Thread-safe.

    A record is written under the first free number and never changed, which every
    backend can do, write-once ones too. So a reader sees all of a record or nothing,
    and what was read once stays true until the backend evicts it.

    Args:
        backend: Where the records are.
        fingerprint: ``Fingerprint.short``.
    """

    def __init__(self, backend: Backend, fingerprint: str) -> None:
        self._backend = backend
        self._fingerprint = fingerprint
        self._lock = Lock()
        self._known: OrderedDict[str, list[Record | None]] = OrderedDict()

    def read(self, names: Sequence[str], fresh: bool = False) -> list[list[Record]]:
        """Return the records of each segment, newest first.

        Args:
            names: Segments.
            fresh: Read all again; otherwise those read before are taken as they were,
                and only later ones are looked for.
        """
        found: dict[str, list[Record | None]] = {
            name: [] if fresh else self._recall(name) for name in names
        }
        pending = list(found)
        while pending:
            keys = [self._key(name, len(found[name])) for name in pending]
            buffers = self._backend.read(keys, RECORD_BYTES)
            for name, buffer in zip(pending, buffers, strict=True):
                if buffer is not None:
                    found[name].append(self._decode(name, buffer))
            pending = [
                name
                for name, buffer in zip(pending, buffers, strict=True)
                if buffer is not None and len(found[name]) < MOST_RECORDS
            ]
        for name, records in found.items():
            self._remember(name, records)
        return [[r for r in reversed(found[name]) if r is not None] for name in names]

    def knows(self, name: str) -> bool:
        """Say whether a record of this segment was read before."""
        with self._lock:
            return name in self._known

    def append(self, name: str, record: Record) -> bool:
        """Make a record readable, unless an equal one is.

        Returns:
            It is readable now. False: the backend failed, or there are too many.
        """
        data = encode_record(self._fingerprint, name, record)
        for generation in range(MOST_RECORDS):
            key = self._key(name, generation)
            there = self._backend.read([key], RECORD_BYTES)[0]
            if there is None:
                if not self._backend.write(key, data):
                    return False
                # Another writer may have been faster; a write-once backend says
                # nothing about that.
                there = self._backend.read([key], RECORD_BYTES)[0]
            if there is not None and there.equal(data):
                return True
        return False

    def _key(self, name: str, generation: int) -> str:
        return record_key(self._fingerprint, name, generation)

    def _decode(self, name: str, buffer: torch.Tensor) -> Record | None:
        try:
            return decode_record(buffer, self._fingerprint, name)
        except StoreError as error:
            self._backend.tally.unreadable("record", error)
            return None

    def _recall(self, name: str) -> list[Record | None]:
        with self._lock:
            return list(self._known.get(name, ()))

    def _remember(self, name: str, records: list[Record | None]) -> None:
        with self._lock:
            self._known.pop(name, None)
            if records:
                self._known[name] = records
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
