"""Maps KV slots of the device to the cached segments they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vericache_sglang.kv.segment_length import SEGMENT

if TYPE_CHECKING:
    from collections.abc import Sequence


class OnDevice(NamedTuple):
    """A whole segment in the radix tree.

    Attributes:
        parent: Name of the segment before it; None for a root segment.
        slots: [SEGMENT] int64 on the pool's device, its tokens in order.
    """

    name: str
    parent: str | None
    slots: torch.Tensor


class SegmentSlots:
    """Names of the segments that the radix tree holds, by slot.

    The map from slots to segments is on the pool's device, so that ``enter`` does not
    synchronise with a GPU; ``leave`` does so once.

    Args:
        slots: Number of slots of the KV pool.
        device: Device of the pool.
    """

    def __init__(self, slots: int, device: torch.device | str = "cpu") -> None:
        self._id_of = torch.full((slots,), -1, dtype=torch.int64, device=device)
        self._known: dict[int, OnDevice] = {}
        self._ids: dict[str, int] = {}
        self._next = 0

    def __len__(self) -> int:
        """Segments on the device."""
        return len(self._known)

    def __contains__(self, name: object) -> bool:
        """Return whether a segment is on the device."""
        return name in self._ids

    def enter(self, names: Sequence[str], slots: torch.Tensor) -> None:
        """Name the segments of a prefix that the tree owns; known ones do not change.

        Args:
            names: Names of its whole segments, in order.
            slots: [T] integers, slots of its tokens in order; T >= ``len(names)``
                segments.
        """
        news = [i for i, name in enumerate(names) if name not in self._ids]
        if not news:
            return
        slots = slots.to(torch.int64)
        for i in news:
            own = slots[i * SEGMENT : (i + 1) * SEGMENT].clone()
            self._known[self._next] = OnDevice(
                names[i], names[i - 1] if i else None, own
            )
            self._ids[names[i]] = self._next
            self._id_of[own] = self._next
            self._next += 1

    def leave(self, slots: torch.Tensor) -> list[OnDevice]:
        """Forget the segments that lose a slot, and return them.

        Args:
            slots: [n] integers, slots that the tree frees.
        """
        ids = sorted(set(self._id_of[slots.to(torch.int64)].tolist()))
        left = [self._known.pop(i) for i in ids if i >= 0]
        for segment in left:
            del self._ids[segment.name]
        if left:
            self._id_of[torch.cat([segment.slots for segment in left])] = -1
        return left

    def all(self) -> list[OnDevice]:
        """Return every segment on the device, in order of insertion."""
        return list(self._known.values())

    def clear(self) -> None:
        """Forget every segment."""
        self._known.clear()
        self._ids.clear()
        self._id_of.fill_(-1)
