"""Slots counted exactly: what is held, by whom, and never more than there is."""

from __future__ import annotations

from vericache_sglang.errors import InvariantError


class Room:
    """KV slots of one kind of memory.

    Args:
        name: For messages.
        total: Slots there are, >= 0.
    """

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.used = 0
        self.peak = 0

    @property
    def free(self) -> int:
        """Slots nobody holds."""
        return self.total - self.used

    def take(self, slots: int) -> None:
        """Hold ``slots`` more.

        Raises:
            InvariantError: There are not as many.
        """
        if slots < 0 or slots > self.free:
            raise InvariantError(
                f"{self.name}: {slots} of {self.free} free slots taken"
            )
        self.used += slots
        self.peak = max(self.peak, self.used)

    def give(self, slots: int) -> None:
        """Hold ``slots`` less.

        Raises:
            InvariantError: As many are not held.
        """
        if slots < 0 or slots > self.used:
            raise InvariantError(
                f"{self.name}: {slots} of {self.used} slots given back"
            )
        self.used -= slots


class SharedRoom(Room):
    """Complements by key, each held once for all who use it.

    Args:
        name: For messages.
        total: Slots there are, >= 0.
    """

    def __init__(self, name: str, total: int) -> None:
        super().__init__(name, total)
        self.ready_at: dict[str, float] = {}
        self._users: dict[str, set[str]] = {}
        self._slots: dict[str, int] = {}

    def join(self, key: str, rid: str, slots: int) -> bool:
        """Hold the complement ``key`` for ``rid``; say whether it is held anew.

        Raises:
            InvariantError: It is new and has no room.
        """
        if key in self._users:
            self._users[key].add(rid)
            return False
        self.take(slots)
        self._users[key] = {rid}
        self._slots[key] = slots
        return True

    def leave(self, key: str, rid: str) -> None:
        """Let ``rid`` go; the last one gives the slots back. Strangers are ignored."""
        users = self._users.get(key)
        if users is None or rid not in users:
            return
        users.discard(rid)
        if not users:
            del self._users[key]
            self.ready_at.pop(key, None)
            self.give(self._slots.pop(key))

    def fits(self, key: str, slots: int) -> bool:
        """Say whether ``join`` would find room."""
        return key in self._users or slots <= self.free
