"""Draft KV of cached segments on the device, shared by requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.prefix_cache.segment_images import DraftPart


class DraftSegmentPool:
    """Owns the slots of draft KV that several requests may share.

    The slots belong neither to a request nor to the radix tree. ``TieredCache`` reports
    them to SGLang as protected while a request uses them, and as evictable otherwise.
    """

    def __init__(self) -> None:
        # In order of last use: the first is evicted first.
        self._parts: dict[str, DraftPart] = {}
        self._used = 0
        self._idle = 0

    def __len__(self) -> int:
        """Segments with draft KV here."""
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        """Return whether a segment has draft KV here."""
        return name in self._parts

    @property
    def used_slots(self) -> int:
        """Slots that requests use."""
        return self._used

    @property
    def idle_slots(self) -> int:
        """Slots that no request uses, which can be evicted."""
        return self._idle

    def get(self, name: str) -> DraftPart | None:
        """Return a segment's draft KV, or None."""
        return self._parts.get(name)

    def add(self, name: str, part: DraftPart) -> None:
        """Add draft KV without users, taking ownership of its slots.

        Raises:
            InvariantError: The segment has draft KV, or ``part`` has users.
        """
        if name in self._parts or part.users:
            raise InvariantError(f"a second draft part for segment {name}")
        self._parts[name] = part
        self._idle += len(part.slots)

    def take(self, names: Sequence[str]) -> list[DraftPart]:
        """Add a reference to the draft KV of each segment, and return it.

        Raises:
            InvariantError: A segment has no draft KV here.
        """
        missing = [name for name in names if name not in self._parts]
        if missing:
            raise InvariantError(f"no draft part of segments {missing}")
        taken = []
        for name in names:
            part = self._parts[name] = self._parts.pop(name)
            if not part.users:
                self._idle -= len(part.slots)
                self._used += len(part.slots)
            part.users += 1
            taken.append(part)
        return taken

    def give(self, names: Sequence[str]) -> None:
        """Drop a reference to the draft KV of each segment.

        Raises:
            InvariantError: The draft KV of a segment has no reference.
        """
        for name in names:
            part = self._parts.get(name)
            if part is None or not part.users:
                raise InvariantError(f"nobody lists the draft part of segment {name}")
            part.users -= 1
            if not part.users:
                self._idle += len(part.slots)
                self._used -= len(part.slots)

    def idle(self) -> list[str]:
        """Return the segments with unused draft KV, least recently used first."""
        return [name for name, part in self._parts.items() if not part.users]

    def remove(self, name: str) -> DraftPart:
        """Remove draft KV; the caller owns its slots now.

        Raises:
            InvariantError: A request uses it, or it is not here.
        """
        part = self._parts.get(name)
        if part is None or part.users:
            raise InvariantError(f"the draft part of segment {name} is not idle")
        del self._parts[name]
        self._idle -= len(part.slots)
        return part

    def forget_users(self) -> None:
        """Reset all reference counts to 0."""
        for part in self._parts.values():
            part.users = 0
        self._used = 0
        self._idle = sum(len(part.slots) for part in self._parts.values())

    def clear(self) -> None:
        """Forget all draft KV, whose slots SGLang has freed already.

        Raises:
            InvariantError: A request still uses some.
        """
        if self._used:
            raise InvariantError(f"{self._used} slots of draft parts are in use")
        self._parts.clear()
        self._idle = 0
