"""Copies on a stream, over a device whose work runs late and in any order."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cuda import until
from stream_link import (
    DTYPE,
    GEOMETRY,
    LAYERS,
    LEASE,
    PLACES,
    POOL,
    at,
    bits,
    filled,
    leaving,
    new_pages,
    new_pool,
    new_residual,
    opened,
    scramble,
    wanted,
)

from vericache_sglang.errors import TransferError
from vericache_sglang.kv import stream_transfers
from vericache_sglang.kv.host_image import CopyTarget
from vericache_sglang.kv.residual import RawResidual
from vericache_sglang.kv.segmented_residual import SegmentedResidual
from vericache_sglang.kv.swapped import SwappedImage

seeds = st.integers(0, 10**6)

counted = st.sampled_from([(16,), (7, 9), (1, 4, 4, 7), (5, 1, 10)])
"""Slots of a complement's segments; they cut the lease's spans, or fit them."""


@given(seed=seeds, counts=counted, neighbours=st.booleans())
def test_a_copy_waits_for_the_forward_before_it_and_is_whole_when_it_is_done(
    seed, counts, neighbours
):
    with opened(seed) as link:
        residual = new_residual(counts, new_pages(neighbours))
        before = [at(link.pool, layer, PLACES) for layer in range(LAYERS)]
        link.launch(*range(LAYERS))
        transfer = link.copies.start(residual, LEASE, None)
        link.clock.run(seed % 7)
        link.finish(transfer)
        link.launch(*range(LAYERS))
        link.clock.drain()
        assert link.read[:LAYERS] == before
        after = [wanted(residual, layer) for layer in range(LAYERS)]
        assert link.read[LAYERS:] == after
        others = [i for i in range(POOL) if i not in PLACES]
        fresh = new_pool()
        for layer in range(LAYERS):
            assert at(link.pool, layer, others) == at(fresh, layer, others)
        assert transfer.nbytes == 16 * GEOMETRY.token_bytes
        assert transfer.seconds > 0


def test_a_forward_that_does_not_wait_can_read_what_was_there_before():
    """The device would show it: in some order the layer is not there yet."""
    seen = set()
    for seed in range(40):
        with opened(seed) as link:
            residual = new_residual((16,))
            transfer = link.copies.start(residual, LEASE, None)
            until(transfer.future.done)
            link.clock.run(seed)
            link.launch(LAYERS - 1)
            link.finish(transfer)
            seen.add(link.read[0] == wanted(residual, LAYERS - 1))
    assert seen == {True, False}


@given(seed=seeds)
def test_a_copy_is_done_when_the_device_is_not_when_it_is_queued(seed):
    with opened(seed) as link:
        residual = new_residual((7, 9))
        transfer = link.copies.start(residual, LEASE, None)
        until(transfer.future.done)
        while not transfer.done():
            assert link.clock.step()
        for layer in range(LAYERS):
            assert at(link.pool, layer, PLACES) == wanted(residual, layer)
        # 4 pieces a layer, keys and values, a millisecond each.
        assert transfer.seconds == pytest.approx(8e-3 * LAYERS, abs=3e-3)


@given(seed=seeds, steps=st.integers(0, 12))
def test_after_a_cancel_nothing_is_written_any_more(seed, steps):
    with opened(seed) as link:
        residual = new_residual((16,))
        transfer = link.copies.start(residual, LEASE, None)
        link.clock.run(steps)
        transfer.cancel()
        buffers = [each.memory for side in link.pool for each in side]
        for buffer in buffers:
            buffer.zero_()  # somebody else's now
        link.clock.drain()
        assert not any(buffer.any() for buffer in buffers)
        transfer.cancel()


def test_a_cancel_keeps_later_layers_from_being_queued(monkeypatch):
    reached, go_on = threading.Event(), threading.Event()
    verify = RawResidual.verify

    def slow(self, layer):
        if layer == 1:
            reached.set()
            assert go_on.wait(120)
        verify(self, layer)

    monkeypatch.setattr(RawResidual, "verify", slow)
    with opened(3) as link:
        transfer = link.copies.start(new_residual((16,)), LEASE, None)
        assert reached.wait(120)
        other = threading.Thread(target=transfer.cancel)
        other.start()
        until(transfer._stopped.is_set)
        go_on.set()
        while other.is_alive():
            link.clock.step()
        with pytest.raises(TransferError, match="cancelled in layer 2"):
            transfer.done()


@pytest.mark.parametrize("damaged", range(LAYERS))
@pytest.mark.parametrize("counts", [(16,), (5, 1, 10)])
def test_a_damaged_layer_is_never_sent(damaged, counts):
    with opened(damaged) as link:
        residual = new_residual(counts)
        before = at(link.pool, damaged, PLACES)
        last = residual.members[-1].tensors["values"]
        last.raw(damaged)[-1][-1] ^= 1
        transfer = link.copies.start(residual, LEASE, None)
        until(transfer.future.done)
        link.clock.drain()
        with pytest.raises(TransferError, match=f"differs in layer {damaged}"):
            transfer.done()
        transfer.cancel()
        assert at(link.pool, damaged, PLACES) == before
        for layer in range(damaged):
            assert at(link.pool, layer, PLACES) == wanted(residual, layer)
        last.raw(damaged)[-1][-1] ^= 1
        link.finish(link.copies.start(residual, LEASE, None))
        assert at(link.pool, damaged, PLACES) == wanted(residual, damaged)


@given(seed=seeds, counts=counted, neighbours=st.booleans())
def test_what_is_saved_is_what_was_gathered_and_comes_back(seed, counts, neighbours):
    with opened(seed) as link:
        page_pool = new_pages(neighbours)
        made = [RawResidual(GEOMETRY, n, 1, DTYPE, page_pool) for n in counts]
        image = made[0] if len(made) == 1 else SegmentedResidual(made)
        for each in made:
            each.describe(torch.zeros(LAYERS, 2, 1, dtype=torch.int32), None)
        saved = link.copies.save(leaving(link, seed), image)
        back = link.copies.start(image, LEASE, None)  # sealed by then
        while not (saved.future.done() and back.future.done()):
            link.clock.step()
        link.finish(saved)
        link.finish(back)
        assert image.sealed
        for layer in range(LAYERS):
            assert wanted(image, layer) == gathered(layer, seed)
            assert at(link.pool, layer, PLACES) == gathered(layer, seed)


@settings(max_examples=30)
@given(seed=seeds, neighbours=st.booleans())
def test_a_swapped_image_comes_back_into_any_slots(seed, neighbours):
    with opened(seed) as link:
        page_pool = new_pages(neighbours)
        image = filled(SwappedImage(GEOMETRY, 16, DTYPE, page_pool))
        slots = link.clock.put(torch.tensor(PLACES[::-1]))
        link.launch(*range(LAYERS))
        before = [at(link.pool, layer, PLACES) for layer in range(LAYERS)]
        transfer = link.copies.load(image, CopyTarget(slots))
        del slots  # the caller's memory is somebody else's soon
        link.finish(transfer)
        link.launch(*range(LAYERS))
        link.clock.drain()
        assert link.read[:LAYERS] == before
        for layer, (keys, values) in enumerate(link.read[LAYERS:]):
            assert (keys[::-1], values[::-1]) == wanted(image, layer)


# -- host memory while the device uses it ------------------------------------------


@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("counts", [(16,), (7, 9)])
def test_bytes_that_are_given_back_stay_until_the_copy_has_ended(way, counts):
    with opened(3) as link:
        page_pool = new_pages()
        residual = new_residual(counts, page_pool)
        size = page_pool.used_bytes
        if way == "in":
            content = wanted(residual, LAYERS - 1)
            transfer = link.copies.start(residual, LEASE, None)
        else:
            transfer = link.copies.save(leaving(link, 5), residual)
        for image in residual.members:
            image.free()
        assert page_pool.used_bytes == page_pool.leaving_bytes == size
        left = page_pool.take(page_pool.free_bytes)
        for block in left.blocks(0, left.nbytes):
            scramble(block, 4)
        if way == "in":
            until(transfer.future.done)
        while not transfer.future.done():
            link.clock.step()
        link.finish(transfer)
        assert page_pool.leaving_bytes == 0
        assert page_pool.used_bytes == left.nbytes
        if way == "in":
            assert at(link.pool, LAYERS - 1, PLACES) == content
        page_pool.check()


@pytest.mark.parametrize("before", [0, 1])
def test_bytes_that_the_caller_s_stream_reads_are_let_go_of_whenever_it_has(before):
    with opened(3) as link:
        page_pool = new_pages()
        residual = new_residual((16,), page_pool)
        slots = link.clock.put(torch.arange(16))
        for _ in range(before):  # each question takes the device one piece on
            link.clock.main.put(lambda: None)
        link.copies.place(residual, CopyTarget(slots))
        residual.free()
        assert page_pool.leaving_bytes
        while link.clock.main.work:
            link.copies._reap()
        link.copies._reap()
        assert not page_pool.leaving_bytes


@pytest.mark.parametrize("how", ["cancelled", "damaged", "not taken", "never begun"])
def test_a_copy_that_ends_badly_lets_go_of_its_bytes_too(how):
    with opened(3) as link:
        page_pool = new_pages()
        residual = new_residual((7, 9), page_pool)
        if how == "damaged":
            residual.members[1].tensors["keys"].raw(1)[0][0] ^= 1
        if how == "not taken":
            link.copies.close()
            with pytest.raises(RuntimeError, match="shutdown"):
                link.copies.start(residual, LEASE, None)
        elif how == "never begun":
            queued, thread = threading.Event(), link.copies._loads
            thread.submit(queued.wait)
            thread.submit(thread.shutdown, wait=False, cancel_futures=True)
            link.copies.start(residual, LEASE, None)
            queued.set()
            link.copies.close()
        else:
            transfer = link.copies.start(residual, LEASE, None)
            transfer.cancel()
        for image in residual.members:
            image.free()
        assert page_pool.used_bytes == 0
        page_pool.check()


def test_a_save_that_fails_half_way_waits_for_its_copies_and_lets_go():
    def broken(link):
        blocks = leaving(link, 5)
        yield next(blocks)
        raise RuntimeError("a selector's own")

    with opened(3) as link:
        link.clock.runs = True
        page_pool = new_pages()
        residual = new_residual((7, 9), page_pool)
        with pytest.raises(RuntimeError, match="a selector's own"):
            link.copies.save(broken(link), residual)
        before = [wanted(residual, layer) for layer in range(LAYERS)]
        link.clock.drain()
        assert [wanted(residual, layer) for layer in range(LAYERS)] == before
        for image in residual.members:
            image.free()
        assert page_pool.used_bytes == 0


def gathered(layer, seed):
    """Return what ``leaving`` yields for a layer."""
    return tuple(
        bits(scramble(torch.zeros(16, 2, dim, dtype=DTYPE), seed + 10 * layer + i))
        for i, dim in enumerate((4, 6))
    )


@settings(max_examples=20)
@given(seed=seeds)
def test_a_save_has_no_more_layers_in_flight_than_it_may(seed):
    with pytest.MonkeyPatch.context() as patch, opened(seed) as link:
        patch.setattr(stream_transfers, "IN_FLIGHT", 1)
        link.clock.runs = True
        page_pool = new_pages()
        image = RawResidual(GEOMETRY, 16, 1, DTYPE, page_pool)
        image.describe(torch.zeros(LAYERS, 2, 1, dtype=torch.int32), None)
        flying = []

        def blocks():
            for layer, pair in enumerate(leaving(link, 5)):
                here = [wanted(image, i) == gathered(i, 5) for i in range(layer)]
                flying.append(here.count(False))
                yield pair

        transfer = link.copies.save(blocks(), image)
        until(transfer.future.done)
        link.finish(transfer)
        assert max(flying) <= 2, "one is copied while the one before it is sealed"
        assert image.sealed
