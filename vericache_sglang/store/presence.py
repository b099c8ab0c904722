"""Which segments are there, as far as their records and the backend's keys tell."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from vericache_sglang.store.records import held, object_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from typing import TypeAlias

    from vericache_sglang.store.backend import Backend
    from vericache_sglang.store.payload import Part
    from vericache_sglang.store.record_log import RecordLog
    from vericache_sglang.store.records import Held, Stored

    Choices: TypeAlias = Callable[[Held], Iterable[tuple[Stored, ...]]]
    """From what is held of a segment to sets of objects, any of which will do."""

BATCH = 64
"""Segments looked up in one bounded call: 32,768 tokens."""


def alone(held: Held, part: Part, packer: str) -> list[tuple[Stored, ...]]:
    """Return the objects of one part, made by one compressor (``compressor_key``)."""
    return [
        (stored,)
        for (by, _), parts in held.items()
        if by == packer
        for stored in parts.get(part, [])
    ]


def paired(held: Held, packer: str | None = None) -> list[tuple[Stored, ...]]:
    """Return draft parts and rests of one split; of any compressor where None."""
    return [
        both
        for (by, _), parts in held.items()
        if packer in (None, by)
        for both in product(parts.get("draft", []), parts.get("rest", []))
    ]


def restorable(held: Held) -> list[tuple[Stored, ...]]:
    """Return all that a segment's KV can be made from."""
    return [*alone(held, "whole", ""), *paired(held)]


class Presence:
    """Asks the backend for keys, many in one call. Thread-safe, reads no object.

    Args:
        backend: Where the objects are.
        log: Records of the same backend.
        fingerprint: ``Fingerprint.short``.
        unusable: Keys of objects found damaged; may grow meanwhile.
    """

    def __init__(
        self,
        backend: Backend,
        log: RecordLog,
        fingerprint: str,
        unusable: Collection[str],
    ) -> None:
        self._backend = backend
        self._log = log
        self._fingerprint = fingerprint
        self._unusable = unusable

    def run(self, names: Sequence[str], choices: Choices) -> int:
        """Count the segments, from the first on, for which some choice is all there."""
        for start in range(0, len(names), BATCH):
            batch = names[start : start + BATCH]
            there = self._there(batch, choices, fresh=False)
            # What is remembered may have been evicted, and stored anew by another.
            again = [n for n in batch if not there[n] and self._log.knows(n)]
            if again:
                there |= self._there(again, choices, fresh=True)
            for index, name in enumerate(batch):
                if not there[name]:
                    return start + index
        return len(names)

    def _there(
        self, names: Sequence[str], choices: Choices, fresh: bool
    ) -> dict[str, bool]:
        options = {
            name: [
                [object_key(self._fingerprint, name, stored) for stored in choice]
                for choice in choices(held(records))
            ]
            for name, records in zip(names, self._log.read(names, fresh), strict=True)
        }
        asked = sorted(
            {key for sets in options.values() for some in sets for key in some}
        )
        asked = [key for key in asked if key not in self._unusable]
        present = self._backend.present(asked)
        good = {key for key, is_there in zip(asked, present, strict=True) if is_there}
        return {
            name: any(good.issuperset(option) for option in sets)
            for name, sets in options.items()
        }
