"""Host memory that is locked: no more than asked for, filled before, unlocked again."""

import ctypes
import mmap
import threading

import pytest
import torch
from lent_bytes import BYTES, content, write
from simulated_cuda import simulated
from simulated_tensors import CUDA

from vericache_sglang.errors import ConfigError
from vericache_sglang.memory.arena import Arena
from vericache_sglang.memory.pinned_memory import HUGE_PAGE, THREADS


@pytest.mark.parametrize("nbytes", [64, 4096, 5 * 4096 + 64, (3 << 20) + 640])
def test_a_pinned_arena_locks_its_bytes_and_no_more_and_unlocks_them(nbytes):
    with simulated() as device:
        arena = Arena(nbytes + 63, pinned=True)
        assert device.registered == {arena.buffer.data_ptr(): nbytes}
        assert arena.size == nbytes
        extent = arena.take(nbytes)
        write(extent, 1)
        assert extent.view(BYTES, (nbytes,)).is_pinned()
        there = extent.view(BYTES, (nbytes,)).to(CUDA, non_blocking=True)
        device.drain()
        assert device.look(there).numpy().tobytes() == content(1, nbytes)
        assert device.waits == []
        arena.close()
        assert device.registered == {}
        arena.close()


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
        arena = Arena(nbytes, pinned=True)
        assert not arena.buffer.any()
        arena.close()
    ((resident, pages),) = found
    assert resident == pages
    assert threading.get_ident() not in filled, "the thread that boots waits meanwhile"
    assert (len(filled) > THREADS // 2) is (nbytes > THREADS * HUGE_PAGE)


def test_memory_that_cannot_be_locked_is_refused_by_its_flag():
    with simulated() as device:
        device.locks = 1 << 20
        with pytest.raises(ConfigError, match=r"--vericache-host-gb: 0\.5 GiB of host"):
            Arena(1 << 29, pinned=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pinned_arena_is_copied_to_a_device_without_waiting():
    arena = Arena(1 << 20, pinned=True)
    extent = arena.take(4096)
    write(extent, 1)
    view = extent.view(BYTES, (4096,))
    assert view.is_pinned()
    assert view.cuda(non_blocking=True).cpu().numpy().tobytes() == content(1, 4096)
