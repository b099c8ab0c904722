"""One buffer of host memory: whatever leaves the device has its bytes from it."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.free_spans import GRAIN, rounded
from vericache_sglang.memory.pinned_memory import PinnedMemory
from vericache_sglang.memory.span_table import SpanTable, Taken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


SPARE_SHARE = 32
"""Of the arena, one part in this many is better left free, see ``Arena.shortfall``."""


class Extent(Taken):
    """Consecutive bytes of an arena in somebody's name; made by ``Arena.take``.

    It is a handle: while nobody holds it, any ``take``, ``room_for`` or ``compact`` of
    the arena may move its bytes, and views made before show something else then. Who
    keeps a view longer holds the extent.

    Attributes:
        start: First byte in the arena; changes when it is moved.
        size: Bytes it takes: ``nbytes`` rounded up to whole grains.
        holds: How often it is held now.
        nbytes: Bytes asked for.
        given: It was given back; somebody may still hold it.
    """

    __slots__ = ("_arena", "_buffer", "_lock", "given", "nbytes")

    def __init__(self, arena: Arena, start: int, nbytes: int) -> None:
        super().__init__(start, rounded(nbytes))
        self.nbytes = nbytes
        self.given = False
        # The buffer lives as long as an extent, but in no cycle: that would keep
        # gigabytes of pinned memory until the collector comes by.
        self._arena = weakref.ref(arena)
        self._buffer = arena.buffer
        self._lock = arena.lock

    def view(
        self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0
    ) -> torch.Tensor:
        """Return bytes of it as a tensor; no copy.

        Args:
            dtype: Of the tensor.
            shape: Of the tensor, which is contiguous.
            offset: First byte within the extent, a multiple of the element's size;
                multiples of 64 keep the arena's alignment.

        Raises:
            InvariantError: It was given back and nobody holds it, or the tensor does
                not fit.
        """
        end = offset + math.prod(shape) * dtype.itemsize
        gone = self.given and not self.holds
        if gone or not 0 <= offset <= end <= self.nbytes:
            raise InvariantError(
                f"{dtype} {tuple(shape)} at byte {offset} of an extent of "
                f"{self.nbytes} bytes{', given back' if gone else ''}"
            )
        raw = self._buffer[self.start + offset : self.start + end]
        return raw.view(dtype).view(tuple(shape))

    def hold(self) -> None:
        """Keep its bytes where they are, until as many ``release``; any thread.

        Raises:
            InvariantError: It was given back.
        """
        with self._lock:
            if self.given:
                raise InvariantError("an extent is held after it was given back")
            self.holds += 1

    def release(self) -> None:
        """Take one ``hold`` back; any thread.

        Raises:
            InvariantError: Nobody holds it.
        """
        with self._lock:
            if not self.holds:
                raise InvariantError("an extent is released more often than held")
            self.holds -= 1
            arena = self._arena()
            if self.given and not self.holds and arena is not None:
                arena.bury(self)

    @contextmanager
    def held(self) -> Iterator[Extent]:
        """Hold it for a block of code: ``with extent.held():``."""
        self.hold()
        try:
            yield self
        finally:
            self.release()


class Arena:
    """A fixed number of bytes of host memory, taken once and lent in extents.

    Bytes are lent in grains of 64; neighbours that come back merge. Where free bytes
    lie scattered, a ``take`` moves extents nobody holds: with nothing held, it refuses
    only what exceeds ``free_bytes``. Extents that are held from the start lie at the
    high end, so that what moves and what does not stay apart.

    Deterministic: the same calls give the same addresses on every rank. One lock
    guards every call, so any thread may hold and release; but a view that nobody
    holds is good only until the next call.

    Args:
        nbytes: Size in bytes; a broken grain at the end stays unused.
        pinned: Lock the pages for copies by a CUDA device, until ``close``; else pages
            nobody wrote cost nothing.

    Attributes:
        buffer: [size] uint8.
        lock: Guards addresses and holds.
        leaving_bytes: Of ``used_bytes``, those given back while somebody holds them.
    """

    def __init__(self, nbytes: int, pinned: bool) -> None:
        size = nbytes // GRAIN * GRAIN
        self._pinned = PinnedMemory(size) if pinned and size else None
        if self._pinned is None:
            self.buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        else:
            self.buffer = self._pinned.buffer
        self.lock = threading.RLock()
        self.leaving_bytes = 0
        base = self.buffer.data_ptr()

        def copy(span: Taken, start: int) -> None:
            # Old and new place may overlap, which torch's copy does not allow.
            ctypes.memmove(base + start, base + span.start, span.size)

        self._spans = SpanTable(size, copy)

    @property
    def size(self) -> int:
        """Bytes lent and free together."""
        return self.buffer.numel()

    @property
    def free_bytes(self) -> int:
        """Bytes nobody has; O(1)."""
        return self._spans.free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes lent, each extent rounded up to grains; O(1)."""
        return self.size - self.free_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes moved so far to make room."""
        return self._spans.moved_bytes

    def take(self, nbytes: int, held: bool = False) -> Extent | None:
        """Lend bytes; may move extents nobody holds.

        O(1) where a free span is large enough as it is; see ``SpanTable.hole``.

        Args:
            nbytes: Bytes wanted, >= 0; at least a grain is taken.
            held: The caller holds it from the start.

        Returns:
            None where there is no room: fewer bytes are free, or held extents lie
            between them. Contents are whatever was there.

        Raises:
            InvariantError: ``nbytes`` is negative.
        """
        if nbytes < 0:
            raise InvariantError(f"an extent of {nbytes} bytes")
        with self.lock:
            size = rounded(nbytes)
            hole = self._spans.hole(size)
            if hole is None:
                return None
            start = hole.end - size if held else hole.start
            extent = Extent(self, start, nbytes)
            self._spans.fill(hole, extent)
            if held:
                extent.hold()
            return extent

    def room_for(self, nbytes: int) -> bool:
        """Say whether a ``take`` of ``nbytes`` that comes next will find room.

        It makes that room: extents nobody holds may be moved.
        """
        with self.lock:
            return self._spans.hole(rounded(nbytes)) is not None

    def shortfall(self, nbytes: int) -> int:
        """Return the bytes to give up before a ``take``, so that it moves little.

        To gather the last free bytes of an arena takes moving most of the rest. With
        a spare 1/32 of it about a byte is moved for every byte written, however large
        the arena (measured).

        Args:
            nbytes: Bytes that are to be taken.

        Returns:
            0 where a free span is large enough as it is, else what is missing of
            ``nbytes`` and the spare bytes together; at least 0.
        """
        with self.lock:
            size = rounded(nbytes)
            if self._spans.has_hole(size):
                return 0
            return max(0, size + self.size // SPARE_SHARE - self.free_bytes)

    def give(self, extent: Extent) -> None:
        """Take an extent back; its bytes are free once nobody holds it.

        Raises:
            InvariantError: It was given back before, or is another arena's.
        """
        with self.lock:
            self._require_mine(extent)
            extent.given = True
            self.leaving_bytes += extent.size
            if not extent.holds:
                self.bury(extent)

    def bury(self, extent: Extent) -> None:
        """Free what was given back and nobody holds; ``give`` and ``release`` do."""
        self.leaving_bytes -= extent.size
        self._spans.free(extent)

    def shrink(self, extent: Extent, nbytes: int) -> None:
        """Take the beginning of an extent back; its end stays where it is, held or not.

        Held extents lie at the high end of what was free, so bytes that come back at
        their beginning join the rest.

        Args:
            extent: Not given back; views of its end stay good, their offsets change.
            nbytes: Bytes it keeps, rounded up to grains; at most what it has.

        Raises:
            InvariantError: It has fewer bytes, or is not the arena's any more.
        """
        with self.lock:
            self._require_mine(extent)
            if not 0 <= nbytes <= extent.size:
                raise InvariantError(
                    f"an extent of {extent.size} bytes is shrunk to {nbytes}"
                )
            self._spans.cut(extent, rounded(nbytes))
            extent.nbytes = extent.size

    def close(self) -> None:
        """Unlock pages; no copy runs, and none is made any more."""
        if self._pinned is not None:
            self._pinned.close()

    def compact(self) -> None:
        """Gather free bytes: all extents nobody holds move towards the start."""
        with self.lock:
            self._spans.compact()

    def check(self) -> None:
        """Count everything anew; O(extents).

        Raises:
            InvariantError: Spans overlap or leave gaps, or a count is off.
        """
        with self.lock:
            taken = self._spans.check()
            leaving = 0
            for extent in taken:
                if not isinstance(extent, Extent) or extent.holds < extent.given:
                    raise InvariantError(
                        f"host arena: bytes {extent.start} to {extent.end} are nobody's"
                    )
                leaving += extent.size * extent.given
            if leaving != self.leaving_bytes:
                raise InvariantError(
                    f"host arena: {self.leaving_bytes} bytes booked as leaving, "
                    f"{leaving} are"
                )

    def _require_mine(self, extent: Extent) -> None:
        if extent.given or not self._spans.has(extent):
            raise InvariantError(
                "an extent was given back before, or is another arena's"
            )


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Lay tensors out one behind the other, each at a multiple of 64 bytes.

    Args:
        sizes: Bytes of each; one of 0 bytes takes none.

    Returns:
        The first byte of each, and the bytes of all.
    """
    steps = (rounded(size) if size else 0 for size in sizes)
    *offsets, total = accumulate(steps, initial=0)
    return offsets, total
