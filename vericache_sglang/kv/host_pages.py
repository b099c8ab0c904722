"""Host memory in pages of one size, for all KV that leaves the device."""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from vericache_sglang.device.pinned_memory import PinnedMemory, mapped
from vericache_sglang.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vericache_sglang.kv.geometry import KVGeometry

HOST = torch.device("cpu")

ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line, as DMA prefers."""

PAGE_TOKENS = 128
"""Tokens whose keys (or values) of one layer fill a page.

Llama-3.1-8B in bf16: 256 KiB. An image leaves half a page unused on average, 0.3 % of
the residual KV of a segment of 512 tokens that keeps a quarter (48 MiB), 0.8 % of its
draft KV. Where no two pages of an image are contiguous, a copy is 256 KiB long; it is
768 KiB where all are, which is the size of the segment in one layer.
"""


def page_bytes_of(geometry: KVGeometry) -> int:
    """Return the bytes of a page, a multiple of a token's key and of its value."""
    dims = math.lcm(geometry.head_dim, geometry.v_head_dim)
    return PAGE_TOKENS * geometry.kv_heads * dims * geometry.element_bytes


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the aligned first byte of each tensor, and the total bytes."""
    *starts, total = accumulate(map(aligned, sizes), initial=0)
    return starts, total


class HostPages:
    """Pages of one owner, addressed as one byte range; see ``HostPagePool.take``.

    Attributes:
        holds: Copies that use them now; they delay reuse beyond ``free``.
        freed: Whether the owner has freed them.
    """

    def __init__(self, pool: HostPagePool, pages: list[int]) -> None:
        self.holds = 0
        self.freed = False
        # Pages keep the buffer alive, but without a reference cycle: it would hold
        # gigabytes of pinned memory until the next garbage collection.
        self._pool = weakref.ref(pool)
        self._buffer = pool.buffer
        self._lock = pool.lock
        self._page_bytes = pool.page_bytes
        self._set(pages)

    @property
    def pages(self) -> list[int]:
        """Page numbers, in order."""
        return self._pages

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return len(self._pages) * self._page_bytes

    def hold(self) -> None:
        """Prevent reuse of the pages until the matching ``release``; any thread.

        Raises:
            InvariantError: They were freed.
        """
        with self._lock:
            if self.freed:
                raise InvariantError("host pages are held after they were freed")
            self.holds += 1

    def release(self) -> None:
        """End one ``hold``; any thread.

        Raises:
            InvariantError: There is no ``hold``.
        """
        with self._lock:
            if not self.holds:
                raise InvariantError("host pages are released more often than held")
            self.holds -= 1
            self._return(self._pages if self.freed and not self.holds else [])

    def free(self) -> None:
        """Free the pages; the pool reuses them once no copy holds them.

        Raises:
            InvariantError: They were freed before.
        """
        with self._lock:
            if self.freed:
                raise InvariantError("host pages are freed twice")
            self.freed = True
            self._return([] if self.holds else self._pages)

    def shrink(self, nbytes: int) -> None:
        """Free the last pages; the first ``nbytes`` bytes stay.

        Raises:
            InvariantError: There are fewer bytes, or they were freed.
        """
        keep = -(-nbytes // self._page_bytes)
        if self.freed or not 0 <= keep <= len(self._pages):
            raise InvariantError(f"host pages of {self.nbytes} bytes keep {nbytes}")
        with self._lock:
            left = self._pages[keep:]
            self._set(self._pages[:keep])
            self._return(left)

    def blocks(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return bytes ``start`` to ``stop`` as uint8 views, one per run of pages.

        Raises:
            InvariantError: The range exceeds the pages, or they were freed.
        """
        if (self.freed and not self.holds) or not 0 <= start <= stop <= self.nbytes:
            gone = ", freed" if self.freed else ""
            raise InvariantError(
                f"bytes {start} to {stop} of host pages of {self.nbytes} bytes{gone}"
            )
        found, at = [], start
        run = bisect_right(self._firsts, start) - 1
        while at < stop:
            first, (there, size) = self._firsts[run], self._runs[run]
            end = min(stop, first + size)
            found.append(self._buffer[there + at - first : there + end - first])
            at, run = end, run + 1
        return found

    def copies(
        self, start: int, source: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the copies that write a tensor's bytes: (target, source), uint8.

        Args:
            start: The first byte to write.
            source: Contiguous, on any device.
        """
        raw, at = source.view(-1).view(torch.uint8), 0
        for block in self.blocks(start, start + raw.numel()):
            yield block, raw[at : at + len(block)]
            at += len(block)

    def _set(self, pages: list[int]) -> None:
        """Set the pages, and find the contiguous runs among them."""
        self._pages, size = pages, self._page_bytes
        numbers = np.asarray(pages, dtype=np.int64)
        first = np.flatnonzero(np.diff(numbers, prepend=-2) != 1).tolist()
        ends = [*first, len(pages)][1:]
        self._firsts = [at * size for at in first]
        self._runs = [
            (pages[at] * size, (end - at) * size)
            for at, end in zip(first, ends, strict=True)
        ]

    def _return(self, pages: list[int]) -> None:
        pool = self._pool()
        if pool is not None:
            pool.recover(self, pages)


class HostPagePool:
    """A fixed number of pages of host memory, in one buffer allocated once.

    The free pages with the lowest numbers are taken first, as SGLang's allocators do:
    most images lie in few contiguous runs. No page moves. One lock guards every call:
    any thread may hold and release.

    Args:
        nbytes: Size in bytes; a partial page at the end stays unused.
        page_bytes: Bytes of a page, see ``page_bytes_of``.
        pinned: Page-lock the memory for copies by a CUDA device, until ``close``; else
            pages take no memory before their first write.

    Attributes:
        buffer: [size] uint8.
        lock: Guards all state.
        page_bytes: As given.
    """

    def __init__(self, nbytes: int, page_bytes: int, pinned: bool) -> None:
        self.page_bytes = page_bytes
        count = nbytes // page_bytes
        size = count * page_bytes
        self._pinned = PinnedMemory(size) if pinned and size else None
        self.buffer = mapped(size) if self._pinned is None else self._pinned.buffer
        self.lock = threading.RLock()
        self._is_free = np.ones(count, dtype=bool)
        self._free = count
        self._limit: int | None = None
        self._lowest = 0
        self._owned: set[HostPages] = set()

    @property
    def size(self) -> int:
        """Bytes of all pages."""
        return self.buffer.numel()

    @property
    def free_bytes(self) -> int:
        """Bytes of the free pages that may be taken, see ``limit``."""
        return self._takeable * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return self.size - self._free * self.page_bytes

    @property
    def _takeable(self) -> int:
        return self._free if self._limit is None else min(self._free, self._limit)

    def limit(self, nbytes: int) -> None:
        """Let at most ``nbytes`` bytes be taken until the next call.

        Several ranks free pages at different times. If all are limited to what each of
        them has free, the same calls of ``take`` succeed on all.
        """
        with self.lock:
            self._limit = nbytes // self.page_bytes

    @property
    def leaving_bytes(self) -> int:
        """The part of ``used_bytes`` that is freed and still held; recounted."""
        with self.lock:
            return sum(each.nbytes for each in self._owned if each.freed)

    def rounded(self, nbytes: int) -> int:
        """Round ``nbytes`` up to whole pages."""
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def take(self, nbytes: int) -> HostPages | None:
        """Take pages for ``nbytes`` bytes; their contents are undefined.

        Returns:
            The pages; None where too few are free.
        """
        count = self.rounded(nbytes) // self.page_bytes
        with self.lock:
            if count > self._takeable:
                return None
            if self._limit is not None:
                self._limit -= count
            # No page below ``_lowest`` is free; the others are searched in windows.
            pages: list[int] = []
            at, window = self._lowest, max(4096, 2 * count)
            while len(pages) < count:
                if at >= len(self._is_free):
                    raise InvariantError("host pages: fewer are free than counted")
                found = np.flatnonzero(self._is_free[at : at + window])
                pages += (found[: count - len(pages)] + at).tolist()
                at += window
            self._mark(pages, False)
            taken = HostPages(self, pages)
            self._owned.add(taken)
            return taken

    def recover(self, owned: HostPages, pages: list[int]) -> None:
        """Mark pages of ``owned`` free; called by their owner, under the lock."""
        self._mark(pages, True)
        if owned.freed and not owned.holds:
            self._owned.remove(owned)

    def _mark(self, pages: list[int], free: bool) -> None:
        if pages:
            self._is_free[pages] = free
            self._free += len(pages) if free else -len(pages)
            self._lowest = min(self._lowest, pages[0]) if free else pages[-1] + 1

    def close(self) -> None:
        """Unlock the pages; no copy may run then or later."""
        if self._pinned is not None:
            self._pinned.close()

    def check(self) -> None:
        """Compare the counts with a recount; O(pages).

        Raises:
            InvariantError: A page is lost, or is free or owned more than once.
        """
        with self.lock:
            times = self._is_free.astype(np.int8)
            for each in self._owned:
                np.add.at(times, each.pages, 1)
            free = np.count_nonzero(self._is_free)
            if free != self._free or (times != 1).any():
                raise InvariantError(
                    f"host pages: {self._free} counted as free, {free} are; "
                    f"{np.count_nonzero(times == 0)} are lost, "
                    f"{np.count_nonzero(times > 1)} are used twice"
                )


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in host pages, read layer by layer.

    Attributes:
        pages: Pages that hold it.
        dtype: Dtype of its elements.
        shape: [L, ...].
        start: Its first byte in the pages.
    """

    pages: HostPages
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def __getitem__(self, layer: int) -> torch.Tensor:
        """Return one layer; a view if its pages are contiguous, else a copy."""
        return self.read(layer)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield every layer, see ``__getitem__``."""
        return map(self.__getitem__, range(self.shape[0]))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def raw(self, layer: int) -> list[torch.Tensor]:
        """Return a layer's bytes as uint8 views, one per run of pages."""
        start, stop = self._bounds(layer)
        return self.pages.blocks(start, stop)

    def rows(self, layer: int) -> list[torch.Tensor]:
        """Return views [k, ...] of a layer's entries, one per run of pages.

        No page boundary cuts an entry: pages hold whole keys and values.
        """
        row = self.shape[2:]
        blocks = [block.view(self.dtype) for block in self.raw(layer)]
        return [block.view(-1, *row) for block in blocks] or [
            torch.empty(0, *row, dtype=self.dtype)
        ]

    def read(
        self, layer: int | None = None, device: torch.device = HOST
    ) -> torch.Tensor:
        """Return a layer, or all of them, on a device.

        On the host it is a view if the pages are contiguous, else a copy. To a GPU
        the copies are queued on the caller's stream.
        """
        start, stop = self._bounds(layer)
        raw = gathered_on(device, self.pages.blocks(start, stop))
        shape = self.shape if layer is None else self.shape[1:]
        return raw.view(self.dtype).view(shape)

    def write(self, source: torch.Tensor, layer: int | None = None) -> None:
        """Write a layer, or all of them.

        A copy from a GPU is queued on the current stream.

        Args:
            source: Of its shape, any strides and device; converted to its dtype.
            layer: None: all.

        Raises:
            InvariantError: ``source`` has another shape.
        """
        start, _ = self._bounds(layer)
        if source.shape != (self.shape if layer is None else self.shape[1:]):
            raise InvariantError(f"{tuple(source.shape)} written to {self.shape}")
        own = source.detach().to(self.dtype).contiguous()
        for target, part in self.pages.copies(start, own):
            target.copy_(part, non_blocking=True)

    def _bounds(self, layer: int | None) -> tuple[int, int]:
        if layer is None:
            return self.start, self.start + self.nbytes
        size = self.nbytes // self.shape[0]
        return self.start + layer * size, self.start + (layer + 1) * size


def gathered_on(device: torch.device, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate host blocks on a device, along dimension 0.

    Args:
        device: Target device; on the host a single block is returned as it is.
        blocks: Integers of one dtype, of one shape but for dimension 0; may be empty.
    """
    if not blocks:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if len(blocks) == 1:
        return blocks[0].to(device, non_blocking=True)
    count = sum(map(len, blocks))
    shape = (count, *blocks[0].shape[1:])
    joined = torch.empty(shape, dtype=blocks[0].dtype, device=device)
    at = 0
    for block in blocks:
        target = joined[at : at + len(block)]
        if device.type == "cpu":
            # numpy: a transfer thread must not start OpenMP threads.
            target.numpy()[...] = block.numpy()
        else:
            target.copy_(block, non_blocking=True)
        at += len(block)
    return joined
