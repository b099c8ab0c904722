"""Named tensors of cached segments in host pages, with checksums."""

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
    """Tensors of a cached segment: KV entries, positions or scores."""

    noun = "segment"


@dataclass(slots=True, eq=False)
class _Entry:
    """Tensors of one name; a ``damaged`` entry is removed with its last unpin."""

    image: SegmentImage
    pins: int = 0
    damaged: bool = False


class SegmentPool:
    """Named groups of tensors in a shared pool of host pages.

    It never evicts: ``put`` returns False without free pages, and its caller selects
    what to evict. Not thread-safe: only one thread may call it.

    Args:
        page_pool: Pool of the host pages.

    Attributes:
        checksum_failures: Entries found corrupt by ``get``.
    """

    def __init__(self, page_pool: HostPagePool) -> None:
        self.checksum_failures = 0
        self._page_pool = page_pool
        self._entries: dict[str, _Entry] = {}
        self._used = 0
        self._pinned = 0

    def __contains__(self, name: object) -> bool:
        """Return whether an intact entry of this name exists."""
        entry = self._entries.get(name) if isinstance(name, str) else None
        return entry is not None and not entry.damaged

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages of all entries; O(1)."""
        return self._used

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the pages of entries without a pin; O(1)."""
        return self._used - self._pinned

    def put(self, name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy tensors in, bit by bit, replacing those of an entry with this name.

        Args:
            name: Name of the entry.
            tensors: [L, ...] by field name; any dtype, strides and device.

        Returns:
            False without free pages for the new tensors beside the old ones; nothing
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
        """Add an entry whose keys and values a transfer fills; ``get`` waits for it.

        Args:
            name: A name without an entry.
            geometry: Shapes of the pool the KV entries come from.
            slots: Number of tokens, S.
            dtype: Dtype of the pool.
            more: Further tensors [L, ...]; from a GPU they are copied on the current
                stream, so they complete before a copy that is queued next.

        Returns:
            The destination for ``Transfers.save``; drop the name if that fails. None
            without free pages.

        Raises:
            InvariantError: The name has an entry.
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
        """Return a name's tensors after verifying their checksums.

        Returns:
            Read-only tensors. None without an entry, or if it is corrupt: it is dropped
            then, a pinned one with its last unpin.
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
        """Return a name's host pages, for a copy that reads them.

        Raises:
            InvariantError: The name has no entry.
        """
        return self._entry(name).image.pages

    def pin(self, name: str) -> None:
        """Protect an entry from ``drop`` until as many calls of ``unpin``.

        Raises:
            InvariantError: The name has no entry.
        """
        entry = self._entry(name)
        self._pinned += 0 if entry.pins else entry.image.held_bytes
        entry.pins += 1

    def unpin(self, name: str) -> None:
        """Undo one ``pin``.

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
        """Drop a name's entry, if it has one.

        Returns:
            Bytes of its pages, which are free now; 0 without an entry.

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
            InvariantError: The name has no entry.
        """
        return self._entry(name).image.held_bytes

    def names(self) -> list[str]:
        """Return all names, in order of insertion."""
        return list(self._entries)

    def check(self) -> None:
        """Recount all bytes; checksums are not verified.

        Raises:
            InvariantError: A count is wrong, or an entry's pages were freed.
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
        """Allocate pages for tensors; None without free ones."""
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
