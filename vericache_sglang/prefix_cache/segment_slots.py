"""Which slots of the device hold which cached segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vericache_sglang.kv.segment_length import SEGMENT

if TYPE_CHECKING:
    from collections.abc import Sequence


class OnDevice(NamedTuple):
    """A whole segment in the radix tree.

    Attributes:
        name: Its name.
        parent: That of the segment before it, None for the first one.
        slots: [SEGMENT] int64 on the pool's device, its tokens in order.
    """

    name: str
    parent: str | None
    slots: torch.Tensor


class SegmentSlots:
    """Names the segments the radix tree holds, by slot.

    Which slot is whose is known where the pool is, so that naming a prefix does not
    have the host wait for a GPU; giving slots up does, once.

    Args:
        slots: Slots of the KV pool.
        device: Where it is.
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
        """Say whether a segment is on the device."""
        return name in self._ids

    def enter(self, names: Sequence[str], slots: torch.Tensor) -> None:
        """Name a prefix the tree owns; what is known of it already stays.

        Args:
            names: Of its whole segments, in order.
            slots: [T] integers, its tokens in order; T >= ``len(names)`` segments.
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
            slots: [n] integers, slots the tree gives up.
        """
        ids = sorted(set(self._id_of[slots.to(torch.int64)].tolist()))
        left = [self._known.pop(i) for i in ids if i >= 0]
        for segment in left:
            del self._ids[segment.name]
        if left:
            self._id_of[torch.cat([segment.slots for segment in left])] = -1
        return left

    def all(self) -> list[OnDevice]:
        """Return every segment on the device, those entered first come first."""
        return list(self._known.values())

    def clear(self) -> None:
        """Forget every segment."""
        self._known.clear()
        self._ids.clear()
        self._id_of.fill_(-1)
