"""Page-locked host memory is filled by threads before it is locked."""

import ctypes
import mmap
import os
import threading

import pytest
import torch
from simulated_cuda import simulated

from vericache_sglang.device.pinned_memory import (
    HUGE_PAGE,
    THREADS,
    PinnedMemory,
    mapped,
)


def resident_pages(address, nbytes):
    """Return how many pages of a range are there, and how many there could be."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(address + nbytes - first) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    library = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(count * mmap.PAGESIZE)
    assert library.mincore(ctypes.c_void_p(first), size, found) == 0
    return sum(page & 1 for page in found), count


@pytest.mark.parametrize("nbytes", [64, 5 * 4096 + 64, (35 << 20) + 640])
def test_pages_are_there_before_they_are_locked(monkeypatch, nbytes):
    """Locking fills what is missing in one thread, for ten seconds and more."""
    found, filled = [], []
    zero = torch.Tensor.zero_
    monkeypatch.setattr(
        torch.Tensor,
        "zero_",
        lambda part: filled.append(threading.get_ident()) or zero(part),
    )
    with simulated():
        lock = torch.cuda.cudart().cudaHostRegister

        def register(address, size, flags):
            found.append(resident_pages(address, size))
            return lock(address, size, flags)

        monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", register)
        memory = PinnedMemory(nbytes)
        assert not memory.buffer.any()
        memory.close()
    ((resident, pages),) = found
    assert resident == pages
    assert threading.get_ident() not in filled, "the thread that boots waits meanwhile"
    assert (len(filled) > THREADS // 2) is (nbytes > THREADS * HUGE_PAGE)


def test_a_forked_process_has_the_range_and_not_the_bytes():
    """A range that the child lacks is unmapped there with what took its place."""
    buffer = mapped(3 * HUGE_PAGE)
    buffer.fill_(7)
    child = os.fork()
    if not child:
        os._exit(int(buffer[:: mmap.PAGESIZE].any()))
    assert os.waitpid(child, 0) == (child, 0)
    assert (buffer == 7).all()
