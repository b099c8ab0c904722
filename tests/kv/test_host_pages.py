"""Host pages: no byte lost, none lent twice, refused only where too few are free."""

import gc
import os
import random
import threading
import weakref

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulated_cuda import simulated
from simulated_tensors import CUDA

from vericache_sglang.errors import ConfigError, InvariantError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_pages import (
    HostPagePool,
    HostTensor,
    gathered_on,
    layout,
    page_bytes_of,
)

PAGE = 64


def new_pool(nbytes, page=PAGE, pinned=False):
    return HostPagePool(nbytes, page, pinned)


def content(number, nbytes):
    """Bytes that no other number has in this order."""
    return random.Random(number).randbytes(nbytes)


def write(pages, number):
    raw = bytearray(content(number, pages.nbytes))
    if raw:
        source = torch.frombuffer(raw, dtype=torch.uint8)
        for target, part in pages.copies(0, source):
            target.copy_(part)


def read(pool, pages):
    """The bytes of pages, through the pool's own buffer."""
    size = pool.page_bytes
    parts = [pool.buffer[at * size : (at + 1) * size] for at in pages.pages]
    return b"".join(part.numpy().tobytes() for part in parts)


def scattered(count, page=PAGE):
    """Return a pool, and pages of it of which no two are neighbours."""
    pool = new_pool(2 * count * page, page)
    single = [pool.take(1) for _ in range(2 * count)]
    for each in single[::2]:
        each.free()
    return pool, pool.take(count * page)


@given(st.integers(0, 10**5))
def test_bytes_are_rounded_to_pages(nbytes):
    pool = new_pool(10**6 + 63)
    pages = pool.take(nbytes)
    taken = (nbytes + 63) // 64 * 64
    assert pages.nbytes == taken == pool.rounded(nbytes)
    assert (pool.size, pool.used_bytes) == (10**6, taken)
    assert pool.free_bytes == 10**6 - taken


def test_only_too_few_free_pages_refuse():
    pool = new_pool(8 * PAGE)
    every = [pool.take(PAGE) for _ in range(8)]
    assert pool.take(1) is None
    for pages in every[::2]:
        pages.free()
    assert pool.take(4 * PAGE + 1) is None
    apart = pool.take(4 * PAGE)
    assert apart.pages == [0, 2, 4, 6]
    assert [len(block) for block in apart.blocks(0, 4 * PAGE)] == [PAGE] * 4
    assert pool.take(0).nbytes == 0
    pool.check()


def test_neighbours_are_one_block_and_the_lowest_are_taken_first():
    pool = new_pool(8 * PAGE)
    first, second = pool.take(3 * PAGE), pool.take(2 * PAGE)
    first.free()
    third = pool.take(5 * PAGE)
    assert third.pages == [0, 1, 2, 5, 6]
    assert [len(block) for block in third.blocks(0, 5 * PAGE)] == [3 * PAGE, 2 * PAGE]
    assert [len(block) for block in third.blocks(100, 200)] == [92, 8]
    assert third.blocks(192, 192) == []
    assert second.pages == [3, 4]


def test_what_is_written_across_pages_is_read_again():
    pool, pages = scattered(5)
    write(pages, 3)
    assert read(pool, pages) == content(3, 5 * PAGE)
    found = gathered_on(torch.device("cpu"), pages.blocks(30, 250))
    assert found.numpy().tobytes() == content(3, 5 * PAGE)[30:250]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_is_the_same_wherever_its_pages_lie(apart, dtype):
    entry = 2 * 4 * dtype.itemsize
    pool, pages = scattered(8, 4 * entry)
    if not apart:
        pool = new_pool(8 * 4 * entry)
        pages = pool.take(8 * 4 * entry)
    source = torch.randint(0, 256, (3, 10, 2, 4 * dtype.itemsize)).to(torch.uint8)
    source = source.view(dtype)
    tensor = HostTensor(pages, dtype, (3, 10, 2, 4), 2 * entry)
    tensor.write(source.transpose(1, 2).contiguous().transpose(1, 2))  # any strides
    bits = source.view(torch.uint8)
    assert torch.equal(tensor.read().view(torch.uint8), bits)
    for layer, found in enumerate(tensor):
        assert torch.equal(found.view(torch.uint8), bits[layer])
        rows = tensor.rows(layer)
        assert torch.equal(torch.cat(rows).view(torch.uint8), bits[layer])
        assert len(rows) == (len(tensor.raw(layer)) if apart else 1)
        tensor.rows(layer)[-1].view(torch.uint8)[-1] = 7  # views, not copies
        assert tensor[layer].view(torch.uint8)[-1].eq(7).all()
    tensor.write(source[0], layer=2)
    assert torch.equal(tensor[2].view(torch.uint8), bits[0])
    assert (tensor.nbytes, len(list(tensor))) == (30 * entry, 3)


def test_a_tensor_of_no_entries_has_its_shape():
    tensor = HostTensor(new_pool(PAGE).take(0), torch.float32, (2, 0, 2, 4), 0)
    assert tensor[1].shape == (0, 2, 4)
    assert [rows.shape for rows in tensor.rows(0)] == [(0, 2, 4)]
    assert tensor.read().shape == (2, 0, 2, 4)


def test_pages_freed_while_held_are_free_with_the_last_release():
    pool = new_pool(4 * PAGE)
    pages = pool.take(2 * PAGE)
    pages.hold()
    pages.hold()
    pages.free()
    pages.release()
    assert (pool.used_bytes, pool.leaving_bytes) == (2 * PAGE, 2 * PAGE)
    assert pool.take(3 * PAGE) is None
    pages.blocks(0, 8)[0].fill_(7)  # a copy on its way harms nothing
    pool.check()
    pages.release()
    assert (pool.used_bytes, pool.leaving_bytes) == (0, 0)
    assert pool.take(4 * PAGE)
    pool.check()


def test_shrinking_frees_the_last_pages():
    pool, pages = scattered(5)
    write(pages, 1)
    before, numbers = pool.free_bytes, pages.pages
    pages.shrink(2 * PAGE + 1)
    assert (pages.nbytes, pages.pages) == (3 * PAGE, numbers[:3])
    assert pool.free_bytes == before + 2 * PAGE
    assert read(pool, pages) == content(1, 5 * PAGE)[: 3 * PAGE]
    for nbytes in (-PAGE, 3 * PAGE + 1):
        with pytest.raises(InvariantError, match=f"of 192 bytes keep {nbytes}"):
            pages.shrink(nbytes)
    pages.shrink(0)
    assert (pages.nbytes, pages.blocks(0, 0)) == (0, [])
    pool.check()


def test_nothing_is_freed_held_released_or_read_out_of_turn():
    pool = new_pool(4 * PAGE)
    pages = pool.take(100)
    for start, stop in ((-1, 4), (0, 129), (9, 8)):
        with pytest.raises(InvariantError, match=f"bytes {start} to {stop} of host pa"):
            pages.blocks(start, stop)
    with pytest.raises(InvariantError, match="released more often than held"):
        pages.release()
    pages.free()
    with pytest.raises(InvariantError, match="freed twice"):
        pages.free()
    with pytest.raises(InvariantError, match="held after they were freed"):
        pages.hold()
    with pytest.raises(InvariantError, match="of 128 bytes, freed"):
        pages.blocks(0, 1)
    with pytest.raises(InvariantError, match="keep 64"):
        pages.shrink(64)
    assert pool.used_bytes == 0
    pool.check()


def break_a_count(pool, pages):
    pool._free += 1


def break_a_free_page(pool, pages):
    pool._is_free[pages.pages[0]] = True
    pool._free += 1


def lose_a_page(pool, pages):
    pool._is_free[-1] = False
    pool._free -= 1


def lose_an_owner(pool, pages):
    pool._owned.remove(pages)


@pytest.mark.parametrize(
    "damage", [break_a_count, break_a_free_page, lose_a_page, lose_an_owner]
)
def test_a_count_that_is_off_is_found(damage):
    pool = new_pool(8 * PAGE)
    pages = pool.take(3 * PAGE)
    pool.check()
    damage(pool, pages)
    with pytest.raises(InvariantError, match="host pages: "):
        pool.check()


def test_a_count_that_is_too_high_is_an_error_and_no_endless_search():
    pool = new_pool(8 * PAGE)
    pool.take(3 * PAGE)
    pool._free += 1
    with pytest.raises(InvariantError, match="fewer are free than counted"):
        pool.take(6 * PAGE)


class PageMachine(RuleBasedStateMachine):
    """Any history against a dictionary: number of the owner -> bytes, holds."""

    SIZE = 40 * PAGE

    def __init__(self):
        super().__init__()
        self.pool = new_pool(self.SIZE + 17)
        self.owned, self.bytes, self.holds = {}, {}, {}
        self.leaving, self.count = set(), 0

    def some(self, data, among):
        return data.draw(st.sampled_from(sorted(among)))

    @property
    def used(self):
        return sum(map(len, self.bytes.values()))

    @rule(nbytes=st.one_of(st.integers(0, 400), st.integers(0, 2600)))
    def take(self, nbytes):
        pages = self.pool.take(nbytes)
        fits = (nbytes + 63) // 64 * 64 <= self.SIZE - self.used
        assert (pages is not None) == fits
        if pages is not None:
            write(pages, self.count)
            self.owned[self.count] = pages
            self.bytes[self.count] = content(self.count, pages.nbytes)
            self.holds[self.count] = 0
            self.count += 1

    def forget(self, number):
        for book in (self.owned, self.bytes, self.holds):
            del book[number]

    @precondition(lambda self: self.owned.keys() - self.leaving)
    @rule(data=st.data())
    def free(self, data):
        number = self.some(data, self.owned.keys() - self.leaving)
        self.owned[number].free()
        if self.holds[number]:
            self.leaving.add(number)
        else:
            self.forget(number)

    @precondition(lambda self: self.owned.keys() - self.leaving)
    @rule(data=st.data())
    def hold(self, data):
        number = self.some(data, self.owned.keys() - self.leaving)
        self.owned[number].hold()
        self.holds[number] += 1

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def release(self, data):
        number = self.some(data, [n for n, holds in self.holds.items() if holds])
        self.owned[number].release()
        self.holds[number] -= 1
        if number in self.leaving and not self.holds[number]:
            self.leaving.remove(number)
            self.forget(number)

    @precondition(lambda self: self.owned.keys() - self.leaving)
    @rule(data=st.data(), share=st.floats(0, 1))
    def shrink(self, data, share):
        number = self.some(data, self.owned.keys() - self.leaving)
        nbytes = int(share * len(self.bytes[number]))
        self.owned[number].shrink(nbytes)
        self.bytes[number] = self.bytes[number][: (nbytes + 63) // 64 * 64]

    @invariant()
    def every_byte_is_there_and_no_page_is_used_twice(self):
        numbers = [at for pages in self.owned.values() for at in pages.pages]
        assert len(numbers) == len(set(numbers))
        for number, raw in self.bytes.items():
            assert read(self.pool, self.owned[number]) == raw

    @invariant()
    def counts_are_exact(self):
        assert self.pool.used_bytes == self.used
        assert self.pool.free_bytes == self.SIZE - self.used
        gone = sum(len(self.bytes[number]) for number in self.leaving)
        assert self.pool.leaving_bytes == gone
        self.pool.check()


TestPageMachine = PageMachine.TestCase
TestPageMachine.settings = settings(stateful_step_count=60)


def test_pages_nothing_wrote_cost_nothing():
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    pool = new_pool(6 << 30, 1 << 18)
    assert pool.take(3 << 30).nbytes == 3 << 30
    assert process.memory_info().rss - before < 50 << 20


def test_a_pool_nothing_refers_to_is_freed_at_once():
    gc.disable()  # what a cycle holds would stay
    try:
        pool = new_pool(1 << 20)
        pages, gone = pool.take(100), weakref.ref(pool.buffer)
        pool = None
        assert pages.blocks(0, 100)[0].numel() == 100, "its pages keep the bytes"
        pages.hold()
        pages.free()
        pages.release()
        pages = None
        assert gone() is None
    finally:
        gc.enable()


def test_threads_hold_and_release_what_another_frees():
    pool, stop = new_pool(1 << 14), threading.Event()
    waiting = []

    def release():
        while not stop.is_set() or waiting:
            if waiting:
                waiting.pop(0).release()

    threads = [threading.Thread(target=release)]
    threads[0].start()
    rng = random.Random(2)
    for _ in range(2000):
        pages = pool.take(rng.randrange(900))
        if pages is not None:
            pages.hold()
            pages.free()
            waiting.append(pages)
    stop.set()
    threads[0].join()
    assert pool.used_bytes == 0
    pool.check()


@pytest.mark.parametrize("count", [1, 64, 81, 49162])
def test_a_pinned_pool_locks_its_bytes_and_no_more_and_unlocks_them(count):
    nbytes = count * PAGE
    with simulated() as device:
        pool = new_pool(nbytes + 63, pinned=True)
        assert device.registered == {pool.buffer.data_ptr(): nbytes}
        assert pool.size == nbytes
        pages = pool.take(nbytes)
        write(pages, 1)
        (whole,) = pages.blocks(0, nbytes)
        assert whole.is_pinned()
        there = gathered_on(CUDA, [whole])
        device.drain()
        assert device.look(there).numpy().tobytes() == content(1, nbytes)
        assert device.waits == []
        pool.close()
        assert device.registered == {}
        pool.close()


def test_pages_that_lie_apart_reach_a_device_without_waiting():
    with simulated() as device:
        pool = new_pool(8 * PAGE, pinned=True)
        single = [pool.take(1) for _ in range(8)]
        for each in single[::2]:
            each.free()
        pages = pool.take(4 * PAGE)
        write(pages, 1)
        there = gathered_on(CUDA, pages.blocks(10, 200))
        device.drain()
        assert device.look(there).numpy().tobytes() == content(1, 4 * PAGE)[10:200]
        assert device.waits == []
        pool.close()


def test_memory_that_cannot_be_locked_is_refused_by_its_flag():
    with simulated() as device:
        device.locks = 1 << 20
        with pytest.raises(ConfigError, match=r"--vericache-host-gb: 0\.5 GiB of host"):
            new_pool(1 << 29, pinned=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pinned_pool_is_copied_to_a_device_without_waiting():
    pool = new_pool(1 << 20, pinned=True)
    pages = pool.take(4096)
    write(pages, 1)
    (block,) = pages.blocks(0, 4096)
    assert block.is_pinned()
    assert block.cuda(non_blocking=True).cpu().numpy().tobytes() == content(1, 4096)


def test_tensors_are_laid_out_at_multiples_of_64_bytes():
    assert layout(()) == ([], 0)
    assert layout((1, 64, 0, 65, 0)) == ([0, 64, 128, 128, 256], 256)


@pytest.mark.parametrize(
    ("dims", "page"),
    [((128, 128), 128 * 8 * 128 * 2), ((192, 128), 128 * 8 * 384 * 2)],
)
def test_a_page_holds_whole_keys_and_whole_values(dims, page):
    geometry = KVGeometry(
        layers=32,
        kv_heads=8,
        head_dim=dims[0],
        v_head_dim=dims[1],
        element_bytes=2,
        page_size=1,
    )
    assert page_bytes_of(geometry) == page
    assert all(page % (8 * dim * 2) == 0 for dim in dims)
