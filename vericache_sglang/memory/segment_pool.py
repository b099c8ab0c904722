"""Tensors of cached prefixes in host memory, by name, each name with a checksum."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

import torch
import xxhash

from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.arena import layout
from vericache_sglang.memory.free_spans import rounded
from vericache_sglang.memory.pooled_image import Field, PooledImage
from vericache_sglang.memory.splitting import as_bits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.memory.arena import Arena, Extent
    from vericache_sglang.memory.geometry import KVGeometry

    _Shape = tuple[torch.dtype, tuple[int, ...]]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Entry:
    """What one name keeps; ``damaged`` where a pin alone keeps it from being dropped.

    ``checksum``: xxh3 (64 bits) of names, dtypes, shapes and bytes, in name order.
    ``sealed``: it is known; before, a copy is on its way.
    """

    extent: Extent
    fields: tuple[Field, ...]
    checksum: int = 0
    sealed: Event = field(default_factory=Event)
    pins: int = 0
    damaged: bool = False


class SegmentPool:
    """Named groups of tensors in an arena that others use too.

    It never evicts: ``put`` says that there is no room, and its caller knows what is
    worth least. Not thread-safe: one loop is its only caller.

    Args:
        arena: Where the bytes come from.

    Attributes:
        checksum_failures: Entries whose bytes had changed when they were asked for.
    """

    def __init__(self, arena: Arena) -> None:
        self.checksum_failures = 0
        self._arena = arena
        self._entries: dict[str, _Entry] = {}
        self._used = 0
        self._pinned = 0

    def __contains__(self, name: object) -> bool:
        """Say whether a name is here; a damaged one that is pinned is not."""
        entry = self._entries.get(name) if isinstance(name, str) else None
        return entry is not None and not entry.damaged

    @property
    def used_bytes(self) -> int:
        """Bytes all entries take of the arena; O(1)."""
        return self._used

    @property
    def evictable_bytes(self) -> int:
        """Of these, the ones no pin protects; O(1)."""
        return self._used - self._pinned

    @staticmethod
    def bytes_for(tensors: Mapping[str, torch.Tensor]) -> int:
        """Return the bytes of the arena that ``put`` takes for these tensors."""
        return rounded(layout(tensor.nbytes for tensor in tensors.values())[1])

    def room_for(self, nbytes: int) -> bool:
        """Say whether a ``put`` of ``nbytes`` (see ``bytes_for``) would find room now.

        What is not pinned may be moved to make it.
        """
        return self._arena.room_for(nbytes)

    def shortfall(self, nbytes: int) -> int:
        """Return the bytes to evict before a ``put``; see ``Arena.shortfall``."""
        return self._arena.shortfall(nbytes)

    def put(self, name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy tensors in, bit by bit; those the name had before go.

        Args:
            name: Of the entry.
            tensors: By field name; any dtype, shape, strides and device. Views of
                the arena only where they are held.

        Returns:
            False when there is no room, also for both old and new ones; nothing
            changed then.

        Raises:
            InvariantError: The name is pinned.
        """
        known = self._entries.get(name)
        if known is not None and known.pins:
            raise InvariantError(f"segment {name} is written while it is pinned")
        shapes = {
            each: (tensor.dtype, tuple(tensor.shape))
            for each, tensor in tensors.items()
        }
        entry = self._take(shapes)
        if entry is None:
            return False
        try:
            _write(entry, tensors)
        except BaseException:
            self._arena.give(entry.extent)
            raise
        _seal(entry)
        self._enter(name, entry)
        return True

    def open(
        self,
        name: str,
        geometry: KVGeometry,
        slots: int,
        dtype: torch.dtype,
        more: Mapping[str, torch.Tensor] | None = None,
    ) -> PooledImage | None:
        """Enter a name whose keys and values a transfer saves; ``get`` waits for it.

        Args:
            name: Not here yet.
            geometry: Shapes of the pool the entries come from.
            slots: S.
            dtype: Dtype of the pool.
            more: Further tensors; from a GPU they follow on the current stream, so
                they are there when a copy is that is queued next.

        Returns:
            What ``Transfers.save`` is given next; the name is to be dropped where that
            fails. None when there is no room.

        Raises:
            InvariantError: The name is here.
        """
        if name in self._entries:
            raise InvariantError(f"segment {name} is opened a second time")
        more = more or {}
        row = (geometry.layers, slots, geometry.kv_heads)
        shapes = {
            "keys": (dtype, (*row, geometry.head_dim)),
            "values": (dtype, (*row, geometry.v_head_dim)),
            **{each: (t.dtype, tuple(t.shape)) for each, t in more.items()},
        }
        entry = self._take(shapes)
        if entry is None:
            return None
        _write(entry, more, non_blocking=True)
        self._enter(name, entry)
        views = {each.name: each for each in entry.fields}
        return PooledImage(entry.extent, views, partial(_seal, entry))

    def get(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return a name's tensors after checking every byte.

        Returns:
            Views, not to be written: good until the next call that may take bytes of
            the arena, or for as long as the name is pinned. None when it is not here,
            or its bytes changed: it is dropped then, if pinned with its last pin.
        """
        entry = self._entries.get(name)
        if entry is None or entry.damaged:
            return None
        entry.sealed.wait()
        if _checksum(entry) != entry.checksum:
            logger.warning("VeriCache: segment %s was damaged in host memory", name)
            self.checksum_failures += 1
            entry.damaged = True
            if not entry.pins:
                self._remove(name)
            return None
        return {each.name: each.of(entry.extent) for each in entry.fields}

    def extent(self, name: str) -> Extent:
        """Return where a name's bytes are, for a copy that reads them.

        Raises:
            InvariantError: It is not here.
        """
        return self._entry(name).extent

    def pin(self, name: str) -> None:
        """Keep a name here, and its bytes where they are, until as many ``unpin``.

        Raises:
            InvariantError: It is not here.
        """
        entry = self._entry(name)
        entry.extent.hold()
        self._pinned += 0 if entry.pins else entry.extent.size
        entry.pins += 1

    def unpin(self, name: str) -> None:
        """Take one ``pin`` back.

        Raises:
            InvariantError: It is not pinned.
        """
        entry = self._entry(name)
        if not entry.pins:
            raise InvariantError(f"segment {name} is unpinned more often than pinned")
        entry.extent.release()
        entry.pins -= 1
        self._pinned -= 0 if entry.pins else entry.extent.size
        if entry.damaged and not entry.pins:
            self._remove(name)

    def drop(self, name: str) -> int:
        """Let a name go; nothing happens when it is not here.

        Returns:
            Bytes of the arena that became free.

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
        """Return the bytes of the arena a name takes.

        Raises:
            InvariantError: It is not here.
        """
        return self._entry(name).extent.size

    def names(self) -> list[str]:
        """Return all names, those written first come first."""
        return list(self._entries)

    def check(self) -> None:
        """Count everything anew; checksums are not read.

        Raises:
            InvariantError: A count is off.
        """
        entries = self._entries.values()
        used = sum(entry.extent.size for entry in entries)
        pinned = sum(entry.extent.size for entry in entries if entry.pins)
        if (used, pinned) != (self._used, self._pinned):
            raise InvariantError(
                f"segments: {self._used} bytes and {self._pinned} pinned booked, "
                f"{used} and {pinned} held"
            )
        for name, entry in self._entries.items():
            if entry.extent.given or entry.extent.holds < entry.pins:
                raise InvariantError(f"segment {name}: its bytes are not its own")

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise InvariantError(f"segment {name} is not in host memory")
        return self._entries[name]

    def _take(self, shapes: Mapping[str, _Shape]) -> _Entry | None:
        """Take room for tensors of these dtypes and shapes; None without any."""
        names = sorted(shapes)
        sizes = (math.prod(shapes[n][1]) * shapes[n][0].itemsize for n in names)
        offsets, total = layout(sizes)
        extent = self._arena.take(total)
        if extent is None:
            return None
        fields = (
            Field(each, *shapes[each], offset)
            for each, offset in zip(names, offsets, strict=True)
        )
        return _Entry(extent, tuple(fields))

    def _enter(self, name: str, entry: _Entry) -> None:
        if name in self._entries:
            self._remove(name)
        self._entries[name] = entry
        self._used += entry.extent.size

    def _remove(self, name: str) -> int:
        extent = self._entries.pop(name).extent
        self._arena.give(extent)
        self._used -= extent.size
        return extent.size


def _write(
    entry: _Entry, tensors: Mapping[str, torch.Tensor], *, non_blocking: bool = False
) -> None:
    """Copy tensors into their fields of an entry."""
    for each in entry.fields:
        if each.name in tensors:
            own = each.of(entry.extent)
            source = _bits(tensors[each.name].detach())
            _bits(own).copy_(source, non_blocking=non_blocking)


def _seal(entry: _Entry) -> None:
    """Trust an entry's bytes as they are now; any thread."""
    entry.checksum = _checksum(entry)
    entry.sealed.set()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View any tensor as integers; a copy of NaNs as floats may change them."""
    return as_bits(torch.view_as_real(tensor) if tensor.is_complex() else tensor)


def _checksum(entry: _Entry) -> int:
    digest = xxhash.xxh3_64()
    for each in entry.fields:
        # repr of the tuple ends where it ends, so no two headers run together.
        digest.update(repr((each.name, str(each.dtype), each.shape)).encode())
        raw = each.of(entry.extent).reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().data)
    return digest.intdigest()
