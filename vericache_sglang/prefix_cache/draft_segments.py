"""Draft parts of cached segments, on the device, for every request that begins so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(slots=True, eq=False)
class DraftPart:
    """The kept entries of one segment.

    Attributes:
        slots: [n] int64, where they are; in whole pages.
        kept: [L, H, n] int32 on the pool's device, which tokens of the segment they
            are.
        users: Requests whose rows list the slots.
    """

    slots: torch.Tensor
    kept: torch.Tensor
    users: int = 0


class DraftSegmentPool:
    """Owns the slots of draft parts that several rows may list.

    They are neither a request's nor the radix tree's; the tree's class reports them to
    SGLang as protected while somebody uses them, and as evictable otherwise.
    """

    def __init__(self) -> None:
        # In the order of last use: the first is the first to go.
        self._parts: dict[str, DraftPart] = {}
        self._used = 0
        self._idle = 0

    def __len__(self) -> int:
        """Draft parts held."""
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        """Say whether a segment's draft part is here."""
        return name in self._parts

    @property
    def used_slots(self) -> int:
        """Slots some row lists."""
        return self._used

    @property
    def idle_slots(self) -> int:
        """Slots that may be taken back."""
        return self._idle

    def get(self, name: str) -> DraftPart | None:
        """Return a segment's draft part, if it is here."""
        return self._parts.get(name)

    def add(self, name: str, part: DraftPart) -> None:
        """Take over the slots of a draft part that nobody lists yet.

        Raises:
            InvariantError: The segment has one.
        """
        if name in self._parts or part.users:
            raise InvariantError(f"a second draft part for segment {name}")
        self._parts[name] = part
        self._idle += len(part.slots)

    def take(self, names: Sequence[str]) -> list[DraftPart]:
        """Have one more request list these draft parts.

        Raises:
            InvariantError: One of them is not here.
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
        """Have one request less list these draft parts.

        Raises:
            InvariantError: Nobody lists one of them.
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
        """Return the names of the draft parts nobody lists, last used last."""
        return [name for name, part in self._parts.items() if not part.users]

    def remove(self, name: str) -> DraftPart:
        """Give a draft part up; its slots are the caller's now.

        Raises:
            InvariantError: A request lists it, or it is not here.
        """
        part = self._parts.get(name)
        if part is None or part.users:
            raise InvariantError(f"the draft part of segment {name} is not idle")
        del self._parts[name]
        self._idle -= len(part.slots)
        return part

    def forget_users(self) -> None:
        """Nobody lists any of them any more, whatever is counted."""
        for part in self._parts.values():
            part.users = 0
        self._used = 0
        self._idle = sum(len(part.slots) for part in self._parts.values())

    def clear(self) -> None:
        """Forget all; SGLang has taken every slot back.

        Raises:
            InvariantError: A request still lists some.
        """
        if self._used:
            raise InvariantError(f"{self._used} slots of draft parts are in use")
        self._parts.clear()
        self._idle = 0
