"""Residual KV of cached segments on the host, with reference counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from vericache_sglang.kv.residual import RawResidual


@dataclass(slots=True, eq=False)
class _Held:
    residual: RawResidual
    holders: int = 0


class SegmentResiduals:
    """One copy of residual KV per segment; copies without a holder can be evicted.

    Args:
        make: Allocates residual KV of (dropped tokens, kept tokens) in host pages;
            raises ``TransferError`` without free pages.
        free: Frees its host pages.
    """

    def __init__(
        self,
        make: Callable[[int, int], RawResidual],
        free: Callable[[RawResidual], None],
    ) -> None:
        self._make = make
        self._free = free
        self._held: dict[str, _Held] = {}
        self._bytes = 0
        self._held_bytes = 0

    def __contains__(self, name: object) -> bool:
        """Return whether a segment's residual KV is on the host."""
        return name in self._held

    def __len__(self) -> int:
        """Segments with residual KV on the host."""
        return len(self._held)

    @property
    def used_bytes(self) -> int:
        """Host bytes of all residual KV."""
        return self._bytes

    @property
    def evictable_bytes(self) -> int:
        """Host bytes of residual KV without a holder."""
        return self._bytes - self._held_bytes

    def open(self, name: str, slots: int, kept: int) -> RawResidual:
        """Allocate a segment's residual KV; the caller fills and seals it.

        Raises:
            TransferError: No free host pages; nothing was allocated.
            InvariantError: The segment has residual KV.
        """
        if name in self._held:
            raise InvariantError(f"a second complement of segment {name}")
        residual = self._make(slots, kept)
        self._held[name] = _Held(residual)
        self._bytes += residual.held_bytes
        return residual

    def get(self, name: str) -> RawResidual | None:
        """Return a segment's residual KV, or None."""
        held = self._held.get(name)
        return held.residual if held else None

    def hold(self, names: Sequence[str]) -> None:
        """Add a reference to each, which protects it until ``let_go``.

        Raises:
            InvariantError: One of them is not on the host.
        """
        for name in names:
            if name not in self._held:
                raise InvariantError(f"no complement of segment {name}")
        for name in names:
            held = self._held[name]
            if not held.holders:
                self._held_bytes += held.residual.held_bytes
            held.holders += 1

    def let_go(self, names: Sequence[str]) -> None:
        """Drop a reference to each.

        Raises:
            InvariantError: One of them has no reference.
        """
        for name in names:
            held = self._held.get(name)
            if held is None or not held.holders:
                raise InvariantError(f"nobody holds the complement of segment {name}")
            held.holders -= 1
            if not held.holders:
                self._held_bytes -= held.residual.held_bytes

    def is_held(self, name: str) -> bool:
        """Return whether a segment's residual KV has a reference."""
        held = self._held.get(name)
        return held is not None and held.holders > 0

    def drop(self, name: str) -> None:
        """Free a segment's residual KV.

        Raises:
            InvariantError: It has a reference, or is not on the host.
        """
        held = self._held.get(name)
        if held is None or held.holders:
            raise InvariantError(f"the complement of segment {name} may not be freed")
        del self._held[name]
        self._bytes -= held.residual.held_bytes
        self._free(held.residual)

    def forget_users(self) -> None:
        """Reset all reference counts to 0."""
        for held in self._held.values():
            held.holders = 0
        self._held_bytes = 0

    def clear(self) -> None:
        """Free all residual KV.

        Raises:
            InvariantError: One of them has a reference.
        """
        for name in list(self._held):
            self.drop(name)

    def check(self, referred: Collection[str]) -> None:
        """Recount references and bytes.

        Args:
            referred: Names of segments with references, once per reference.

        Raises:
            InvariantError: A reference count or the bytes are wrong.
        """
        holders = Counter({n: each.holders for n, each in self._held.items()})
        nbytes = sum(held.residual.held_bytes for held in self._held.values())
        if holders != Counter(referred) or nbytes != self._bytes:
            raise InvariantError(
                f"segment complements: {holders.total()} holders for "
                f"{len(referred)} uses, {nbytes} bytes of {self._bytes}"
            )
