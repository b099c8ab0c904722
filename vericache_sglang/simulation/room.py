"""Exact accounting of KV slots, with and without sharing."""

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
        """Slots that are free."""
        return self.total - self.used

    def take(self, slots: int) -> None:
        """Allocate ``slots``.

        Raises:
            InvariantError: Fewer are free.
        """
        if slots < 0 or slots > self.free:
            raise InvariantError(
                f"{self.name}: {slots} of {self.free} free slots taken"
            )
        self.used += slots
        self.peak = max(self.peak, self.used)

    def give(self, slots: int) -> None:
        """Free ``slots``.

        Raises:
            InvariantError: Fewer are allocated.
        """
        if slots < 0 or slots > self.used:
            raise InvariantError(f"{self.name}: {slots} of {self.used} slots freed")
        self.used -= slots


class SharedRoom(Room):
    """Residual KV by key, each allocated once for all requests that share it.

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
        """Add a reference of ``rid`` to ``key``; return whether it was allocated.

        Raises:
            InvariantError: The key is new and its slots do not fit.
        """
        if key in self._users:
            self._users[key].add(rid)
            return False
        self.take(slots)
        self._users[key] = {rid}
        self._slots[key] = slots
        return True

    def leave(self, key: str, rid: str) -> None:
        """Drop the reference of ``rid``, if any; the last one frees the slots."""
        users = self._users.get(key)
        if users is None or rid not in users:
            return
        users.discard(rid)
        if not users:
            del self._users[key]
            self.ready_at.pop(key, None)
            self.give(self._slots.pop(key))

    def fits(self, key: str, slots: int) -> bool:
        """Return whether ``join`` would succeed."""
        return key in self._users or slots <= self.free
