"""Tensors of cached prefixes in host memory, by name, each with checksums."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.host_image import RawImage, shapes_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from vericache_sglang.kv.geometry import KVGeometry
    from vericache_sglang.kv.host_image import Shapes
    from vericache_sglang.kv.host_pages import HostPagePool, HostPages, HostTensor

logger = logging.getLogger(__name__)


class SegmentImage(RawImage):
    """Tensors of a cached segment: entries, positions or scores."""

    noun = "segment"


@dataclass(slots=True, eq=False)
class _Entry:
    """What one name keeps; ``damaged``: it goes with its last pin."""

    image: SegmentImage
    pins: int = 0
    damaged: bool = False


class SegmentPool:
    """Named groups of tensors in pages that others use too.

    It never evicts: ``put`` says that there is no room, and its caller knows what is
    worth least. Not thread-safe: one loop is its only caller.

    Args:
        page_pool: Where the pages come from.

    Attributes:
        checksum_failures: Entries whose bytes had changed when they were asked for.
    """

    def __init__(self, page_pool: HostPagePool) -> None:
        self.checksum_failures = 0
        self._page_pool = page_pool
        self._entries: dict[str, _Entry] = {}
        self._used = 0
        self._pinned = 0

    def __contains__(self, name: object) -> bool:
        """Return whether a name is here; a damaged one that is pinned is not."""
        entry = self._entries.get(name) if isinstance(name, str) else None
        return entry is not None and not entry.damaged

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages of all entries; O(1)."""
        return self._used

    @property
    def evictable_bytes(self) -> int:
        """Of these, the ones no pin protects; O(1)."""
        return self._used - self._pinned

    def put(self, name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy tensors in, bit by bit; those the name had before go.

        Args:
            name: Of the entry.
            tensors: [L, ...] by field name; any dtype, strides and device.

        Returns:
            False when there is no room, also for both old and new ones; nothing
            changed then.

        Raises:
            InvariantError: The name is pinned.
        """
        known = self._entries.get(name)
        if known is not None and known.pins:
            raise InvariantError(f"segment {name} is written while it is pinned")
        image = self._take(_shapes(tensors))
        if image is None:
            return False
        try:
            for field, tensor in tensors.items():
                image.tensors[field].write(tensor.cpu())
        except BaseException:
            image.free()
            raise
        for layer in range(image.layers):
            image.seal(layer)
        self._enter(name, image)
        return True

    def open(
        self,
        name: str,
        geometry: KVGeometry,
        slots: int,
        dtype: torch.dtype,
        more: Mapping[str, torch.Tensor] | None = None,
    ) -> SegmentImage | None:
        """Enter a name whose keys and values a transfer saves; ``get`` waits for it.

        Args:
            name: Not here yet.
            geometry: Shapes of the pool the entries come from.
            slots: S.
            dtype: Dtype of the pool.
            more: Further tensors [L, ...]; from a GPU they follow on the current
                stream, so they are there when a copy is that is queued next.

        Returns:
            What ``Transfers.save`` is given next; the name is to be dropped where that
            fails. None when there is no room.

        Raises:
            InvariantError: The name is here.
        """
        if name in self._entries:
            raise InvariantError(f"segment {name} is opened a second time")
        more = more or {}
        image = self._take({**shapes_of(geometry, slots, dtype), **_shapes(more)})
        if image is None:
            return None
        for field, tensor in more.items():
            image.tensors[field].write(tensor)
        self._enter(name, image)
        return image

    def get(self, name: str) -> dict[str, HostTensor] | None:
        """Return a name's tensors after checking every byte.

        Returns:
            Not to be written. None when it is not here, or its bytes changed: it is
            dropped then, if pinned with its last pin.
        """
        entry = self._entries.get(name)
        if entry is None or entry.damaged:
            return None
        try:
            for layer in range(entry.image.layers):
                entry.image.verify(layer)
        except TransferError:
            logger.warning("VeriCache: segment %s was damaged in host memory", name)
            self.checksum_failures += 1
            entry.damaged = True
            if not entry.pins:
                self._remove(name)
            return None
        return entry.image.tensors

    def pages(self, name: str) -> HostPages | None:
        """Return where a name's bytes are, for a copy that reads them.

        Raises:
            InvariantError: It is not here.
        """
        return self._entry(name).image.pages

    def pin(self, name: str) -> None:
        """Keep a name here until as many ``unpin``.

        Raises:
            InvariantError: It is not here.
        """
        entry = self._entry(name)
        self._pinned += 0 if entry.pins else entry.image.held_bytes
        entry.pins += 1

    def unpin(self, name: str) -> None:
        """Take one ``pin`` back.

        Raises:
            InvariantError: It is not pinned.
        """
        entry = self._entry(name)
        if not entry.pins:
            raise InvariantError(f"segment {name} is unpinned more often than pinned")
        entry.pins -= 1
        self._pinned -= 0 if entry.pins else entry.image.held_bytes
        if entry.damaged and not entry.pins:
            self._remove(name)

    def drop(self, name: str) -> int:
        """Drop a name; nothing happens when it is not here.

        Returns:
            Bytes of its pages.

        Raises:
            InvariantError: It is pinned.
        """
        entry = self._entries.get(name)
        if entry is None:
            return 0
        if entry.pins:
            raise InvariantError(f"segment {name} is dropped while it is pinned")
        return self._remove(name)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a name's pages.

        Raises:
            InvariantError: It is not here.
        """
        return self._entry(name).image.held_bytes

    def names(self) -> list[str]:
        """Return all names, those written first come first."""
        return list(self._entries)

    def check(self) -> None:
        """Count everything anew; checksums are not read.

        Raises:
            InvariantError: A count is off.
        """
        entries = self._entries.values()
        used = sum(entry.image.held_bytes for entry in entries)
        pinned = sum(entry.image.held_bytes for entry in entries if entry.pins)
        if (used, pinned) != (self._used, self._pinned):
            raise InvariantError(
                f"segments: {self._used} bytes and {self._pinned} pinned booked, "
                f"{used} and {pinned} held"
            )
        for name, entry in self._entries.items():
            if entry.image.pages is None or entry.image.pages.freed:
                raise InvariantError(f"segment {name}: its pages are not its own")

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise InvariantError(f"segment {name} is not in host memory")
        return self._entries[name]

    def _take(self, shapes: Shapes) -> SegmentImage | None:
        """Take room for tensors; None without any."""
        try:
            return SegmentImage(shapes, self._page_pool)
        except TransferError:
            return None

    def _enter(self, name: str, image: SegmentImage) -> None:
        if name in self._entries:
            self._remove(name)
        self._entries[name] = _Entry(image)
        self._used += image.held_bytes

    def _remove(self, name: str) -> int:
        image = self._entries.pop(name).image
        image.free()
        self._used -= image.held_bytes
        return image.held_bytes


def _shapes(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
