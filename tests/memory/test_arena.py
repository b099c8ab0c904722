"""An arena lends what it has, loses no byte, and refuses only what is not there."""

import gc
import os
import random
import threading
import weakref

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lent_bytes import BYTES, content, grains, new_arena, read, write

from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.arena import layout


@given(st.integers(0, 10**6))
def test_requests_are_rounded_to_grains(nbytes):
    arena = new_arena(2 * 10**6)
    extent = arena.take(nbytes)
    assert (extent.nbytes, extent.size) == (nbytes, grains(nbytes))
    assert extent.start % 64 == 0
    assert arena.buffer.data_ptr() % 64 == 0
    assert (arena.used_bytes, arena.free_bytes) == (
        grains(nbytes),
        2 * 10**6 - grains(nbytes),
    )


def test_a_broken_grain_at_the_end_is_not_lent():
    assert new_arena(1000).size == 960
    assert new_arena(63).take(1) is None
    arena = new_arena(960)
    assert arena.take(961) is None
    assert arena.take(960).size == 960
    assert arena.take(0) is None


def test_scattered_bytes_are_gathered_for_one_request():
    arena = new_arena(64 * 1024)
    extents = [arena.take(1024) for _ in range(64)]
    for number, extent in enumerate(extents):
        write(extent, number)
    for extent in extents[::2]:
        arena.give(extent)
    assert arena.free_bytes == 32 * 1024
    assert arena.take(32 * 1024 + 1) is None
    large = arena.take(32 * 1024)
    arena.check()
    assert arena.free_bytes == 0
    write(large, 99)
    for number, extent in list(enumerate(extents))[1::2]:
        assert read(extent) == content(number, 1024)


def test_neighbours_are_put_into_holes_elsewhere():
    arena = new_arena(8 * 1024)
    extents = [arena.take(1024) for _ in range(8)]
    for number, extent in enumerate(extents):
        write(extent, number)
    arena.give(extents[1])
    arena.give(extents[6])
    # Of 2 KiB in one piece one half is free at 1 or at 6; a neighbour moves.
    assert arena.take(2048)
    assert arena.moved_bytes == 1024
    kept = (0, 2, 3, 4, 5, 7)
    assert sum(extents[i].start != i * 1024 for i in kept) == 1
    assert all(read(extents[i]) == content(i, 1024) for i in kept)


def test_what_was_emptied_is_one_span_with_all_that_is_free_beside_it():
    """Two gaps merged with each other, and not with the hole behind them."""
    arena = Arena(64 * 8, pinned=False)
    sizes = (2, 2, 1, 1, 2)
    gap, moved, hole, wall, elsewhere = (arena.take(64 * size) for size in sizes)
    wall.hold()
    for extent in (elsewhere, hole, gap):
        arena.give(extent)
    assert arena.room_for(64 * 3)
    arena.check()
    assert moved.start > wall.start
    taken = arena.take(64 * 5)
    assert taken.start == 0, "one span of all three"
    arena.check()


def test_a_hole_too_small_for_its_neighbours_is_reached_by_sliding():
    arena = new_arena(6 * 1024)
    first, second = arena.take(1024), arena.take(2048)
    third, fourth = arena.take(1024), arena.take(2048)
    for number, extent in enumerate((first, second, third, fourth)):
        write(extent, number)
    arena.give(first)
    arena.give(third)
    # Neither 2 KiB fits the hole that would be left over: second slides by 1 KiB.
    assert arena.take(2048).start == 2048
    assert arena.moved_bytes == 2048
    assert (second.start, fourth.start) == (0, 4096)
    assert read(second) == content(1, 2048), "old and new place overlap"
    assert read(fourth) == content(3, 2048)


def test_a_shortfall_leaves_a_spare_share_unless_there_is_a_hole():
    arena = new_arena(32 * 1024)
    extents = [arena.take(1024) for _ in range(32)]
    assert arena.shortfall(1) == 64 + 1024
    arena.give(extents[3])
    assert arena.shortfall(1024) == 0, "a hole of its size needs no move"
    assert arena.shortfall(1025) == 1088 + 1024 - 1024
    arena.give(extents[5])
    assert arena.shortfall(1500) == 1536 + 1024 - 2048
    arena.give(extents[7])
    assert arena.shortfall(1500) == 0, "enough is free, in pieces"
    assert arena.moved_bytes == 0


def test_with_spare_bytes_little_is_moved():
    rng, arena = random.Random(3), new_arena(1 << 22)
    live, written = [], 0
    for _ in range(800):
        nbytes = rng.randrange(4_000, 64_000)
        while arena.shortfall(nbytes):
            arena.give(live.pop(rng.randrange(len(live))))
        live.append(arena.take(nbytes))
        written += nbytes
    arena.check()
    assert arena.free_bytes < arena.size / 12, "it is as good as full"
    assert 0 < arena.moved_bytes < 2 * written


def test_held_extents_stay_where_they_are_and_part_what_is_free():
    arena = new_arena(8 * 1024)
    extents = [arena.take(1024) for _ in range(8)]
    for number, extent in enumerate(extents):
        write(extent, number)
    arena.give(extents[0])
    arena.give(extents[7])
    for extent in extents[1:7]:
        extent.hold()
    assert arena.free_bytes == 2048
    assert arena.take(2048) is None
    assert not arena.room_for(1025)
    assert arena.room_for(1024)
    extents[6].release()
    assert arena.take(2048).start == 6 * 1024, "the last one moved to the front"
    assert extents[6].start == 0
    assert [e.start for e in extents[1:6]] == [1024 * i for i in range(1, 6)]
    assert all(read(extents[i]) == content(i, 1024) for i in range(1, 7))


def test_what_is_held_from_the_start_lies_at_the_other_end():
    arena = new_arena(4096)
    low, high = arena.take(100), arena.take(100, held=True)
    assert (low.start, low.holds) == (0, 0)
    assert (high.start, high.holds) == (4096 - 128, 1)


def test_bytes_given_back_while_held_are_free_with_the_last_release():
    arena = new_arena(1024)
    extent = arena.take(512, held=True)
    view = extent.view(BYTES, (512,))
    with extent.held():
        extent.release()
        arena.give(extent)
        assert (arena.used_bytes, arena.leaving_bytes) == (512, 512)
        arena.check()
        write(arena.take(512), 1)
        assert arena.take(64) is None
        view.fill_(7)  # a copy on its way harms nobody
        assert extent.view(BYTES, (512,)).eq(7).all()
    assert (arena.used_bytes, arena.leaving_bytes) == (512, 0)
    assert arena.take(512)
    arena.check()


def test_shrinking_keeps_the_end_in_place():
    arena = new_arena(4096)
    extent = arena.take(1024, held=True)
    write(extent, 1)
    kept = extent.view(BYTES, (300,), 724)
    arena.shrink(extent, 300)
    assert (extent.start, extent.size, extent.nbytes) == (4096 - 320, 320, 320)
    assert kept.numpy().tobytes() == content(1, 1024)[724:]
    assert read(extent) == content(1, 1024)[704:]
    assert arena.free_bytes == 4096 - 320
    assert arena.take(4096 - 320).start == 0, "the rest is one piece again"
    arena.shrink(extent, 320)
    arena.check()
    for nbytes in (-1, 321):
        with pytest.raises(InvariantError, match=f"of 320 bytes is shrunk to {nbytes}"):
            arena.shrink(extent, nbytes)


def test_what_is_in_the_way_goes_behind_a_wall_once_there_is_room():
    arena = new_arena(5 * 1024)
    sizes = (512, 1024, 512, 1024, 512, 1024, 512)
    a, p, b, wall, c, q, d = (arena.take(size) for size in sizes)
    wall.hold()
    write(p, 1)
    write(q, 2)
    for gone in (a, b, c, d):
        arena.give(gone)
    # 512, p, 512 | wall | 512, q, 512: p has a place only after q has slid.
    assert arena.take(2048).start == 0
    assert (q.start, p.start) == (3072, 4096)
    assert (read(p), read(q)) == (content(1, 1024), content(2, 1024))
    assert wall.start == 2048


@pytest.mark.parametrize(
    ("dtype", "shape", "offset"),
    [
        (torch.float32, (3, 5), 0),
        (torch.bfloat16, (2, 1, 3), 64),
        (torch.int64, (), 8),
        (torch.float32, (0, 4), 1024),
    ],
)
def test_views_are_of_the_arena_s_own_bytes(dtype, shape, offset):
    arena = new_arena(4096)
    arena.take(64)
    extent = arena.take(1024)
    view = extent.view(dtype, shape, offset)
    assert (view.dtype, tuple(view.shape), view.is_contiguous()) == (dtype, shape, True)
    if view.numel():
        assert view.data_ptr() == arena.buffer.data_ptr() + 64 + offset
        view.fill_(1)
        end = 64 + offset + view.nbytes
        raw = torch.ones(shape, dtype=dtype).view(-1).view(BYTES)
        assert torch.equal(arena.buffer[64 + offset : end], raw)


def test_a_view_stays_within_what_was_asked_for():
    arena = new_arena(4096)
    extent = arena.take(100)
    for shape, offset in (((26,), 0), ((25,), 4), ((1,), 100), ((1,), -4)):
        with pytest.raises(InvariantError, match=r"of an extent of 100 bytes$"):
            extent.view(torch.float32, shape, offset)
    arena.give(extent)
    with pytest.raises(InvariantError, match="of 100 bytes, given back"):
        extent.view(torch.float32, (1,))


def test_nothing_is_given_back_held_or_released_out_of_turn():
    arena, stranger = new_arena(4096), new_arena(4096)
    extent, other = arena.take(64), arena.take(64, held=True)
    with pytest.raises(InvariantError, match="is another arena's"):
        stranger.give(extent)
    with pytest.raises(InvariantError, match="released more often than held"):
        extent.release()
    for gone in (extent, other):
        arena.give(gone)
        with pytest.raises(InvariantError, match="given back before"):
            arena.give(gone)
        with pytest.raises(InvariantError, match="given back before"):
            arena.shrink(gone, 0)
        with pytest.raises(InvariantError, match="held after it was given back"):
            gone.hold()
    with pytest.raises(InvariantError, match="extent of -1 bytes"):
        arena.take(-1)
    assert arena.used_bytes == 64
    arena.check()


def break_free_bytes(arena):
    arena._spans.free_bytes += 64


def break_an_end(arena):
    arena._spans._ends.popitem()


def break_a_start(arena):
    del arena._spans._starts[0]


def break_a_size(arena):
    arena._spans._starts[0].size += 64


def break_a_list(arena):
    arena._spans._free.discard(arena._spans._free.find(64))


def break_leaving(arena):
    arena.leaving_bytes += 64


@pytest.mark.parametrize(
    "damage",
    [
        break_free_bytes,
        break_an_end,
        break_a_start,
        break_a_size,
        break_a_list,
        break_leaving,
    ],
)
def test_a_count_that_is_off_is_found(damage):
    arena = new_arena(4096)
    extents = [arena.take(128) for _ in range(4)]
    arena.give(extents[1])
    arena.check()
    damage(arena)
    with pytest.raises(InvariantError, match="host arena"):
        arena.check()


def test_pages_nobody_wrote_cost_nothing():
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    arena = new_arena(6 << 30)
    assert arena.take(3 << 30).nbytes == 3 << 30
    assert process.memory_info().rss - before < 50 << 20


def test_an_arena_nobody_refers_to_is_freed_at_once():
    gc.disable()  # what a cycle holds would stay
    try:
        arena = new_arena(1 << 20)
        extent, gone = arena.take(100), weakref.ref(arena.buffer)
        arena = None
        assert extent.view(BYTES, (100,)).numel() == 100, "an extent keeps the bytes"
        extent.hold()
        extent.release()
        extent = None
        assert gone() is None
    finally:
        gc.enable()


def test_what_is_held_in_a_thread_does_not_move_under_it():
    arena = new_arena(1 << 17)
    extents = {number: arena.take(700 + 64 * number) for number in range(40)}
    for number, extent in extents.items():
        write(extent, number)
    wrong, stop = [], threading.Event()

    def look():
        rng = random.Random(1)
        while not stop.is_set():
            number = rng.choice(list(extents))
            with extents[number].held():
                if read(extents[number]) != content(number, 700 + 64 * number):
                    wrong.append(number)

    thread = threading.Thread(target=look)
    thread.start()
    rng, extras = random.Random(2), []
    for _ in range(300):
        if extras and rng.random() < 0.55:
            arena.give(extras.pop(rng.randrange(len(extras))))
        else:
            extent = arena.take(rng.randrange(4000))
            extras += [extent] if extent is not None else []
        arena.compact()
    stop.set()
    thread.join()
    assert not wrong
    assert arena.moved_bytes > 0
    arena.check()


def test_tensors_are_laid_out_at_grains():
    assert layout(()) == ([], 0)
    assert layout((1, 64, 0, 65, 0)) == ([0, 64, 128, 128, 256], 256)
