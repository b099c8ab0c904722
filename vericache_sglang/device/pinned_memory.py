"""Host memory of exactly the requested size, page-locked where a device copies."""

from __future__ import annotations

import logging
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from vericache_sglang.errors import ConfigError

logger = logging.getLogger(__name__)

GIB = 1 << 30
HUGE_PAGE = 2 << 20

MADV_WIPEONFORK = 18
"""A forked process has zeros here; Python has no name for it.

A copied page would move a write of the parent away from what its device copies. And the
child may not lack the range (``MADV_DONTFORK``): its collector unmaps it, with whatever
the child has mapped there since.
"""

THREADS = 8
"""Threads that touch pages at boot: a single one takes 10 s and more for 48 GiB."""


def mapped(nbytes: int) -> torch.Tensor:
    """Return [nbytes] uint8 zeros; pages take no memory before their first write.

    Huge pages where the kernel has them: there are fewer to lock and, while prompts are
    copied in, fewer page faults (62 MB for the first time: 30 to 40 instead of 100 to
    130 ms on a virtual machine).

    Args:
        nbytes: Size, >= 0.
    """
    pages = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, MADV_WIPEONFORK):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(advice)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]


class PinnedMemory:
    """Page-locked bytes for asynchronous copies by a CUDA device.

    Mapped and registered as HiCache's host pools are (SGLang,
    ``mem_cache/pool_host/common.py``): torch's own allocator rounds up to a power of
    two. One registration, because a copy must not span two; made at boot, because
    registering fails while a graph is captured.

    Args:
        nbytes: Size, >= 1.

    Attributes:
        buffer: [nbytes] uint8, zeros.

    Raises:
        ConfigError: CUDA refuses to register so much.
    """

    def __init__(self, nbytes: int) -> None:
        began = time.perf_counter()
        logger.info("VeriCache: page-locking %.1f GiB of host memory", nbytes / GIB)
        self.buffer = mapped(nbytes)
        _fill(self.buffer)  # otherwise registering does, in one thread
        cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(self.buffer.data_ptr(), nbytes, 0))
        if code:
            raise ConfigError(
                f"--vericache-host-gb: {nbytes / GIB:.1f} GiB of host memory cannot be "
                f"page-locked ({cudart.cudaGetErrorString(code)}); ask for less, or "
                f"raise the limit of locked memory (ulimit -l)"
            )
        self._registered = True
        seconds = time.perf_counter() - began
        logger.info("VeriCache: host memory is page-locked, %.1f s", seconds)

    def close(self) -> None:
        """Unlock the pages, once; no copy may use them any more.

        A process that ends with tens of GiB locked hangs in the kernel for a long time.
        """
        if not self._registered:
            return
        self._registered = False
        cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostUnregister(self.buffer.data_ptr()))
        if code:
            reason = cudart.cudaGetErrorString(code)
            logger.warning("VeriCache: host memory stays page-locked: %s", reason)


def _fill(buffer: torch.Tensor) -> None:
    """Touch every page, so that the kernel allocates it."""
    # Whole huge pages, so that two threads never touch the same one.
    share = -(-len(buffer) // THREADS // HUGE_PAGE) * HUGE_PAGE
    parts = [part[:: mmap.PAGESIZE] for part in buffer.split(share)]
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(torch.Tensor.zero_, parts))
