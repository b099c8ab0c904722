"""Copies on a stream, over a device whose work runs late and in any order."""

import threading

import pytest
import torch
from device_clock import until
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_link import (
    DTYPE,
    GEOMETRY,
    LAYERS,
    LEASE,
    NO_DRAFTS,
    PLACES,
    POOL,
    at,
    bits,
    filled,
    leaving,
    new_complement,
    new_pool,
    opened,
    scramble,
    wanted,
)

from vericache_sglang.errors import TransferError
from vericache_sglang.memory import stream_transfers
from vericache_sglang.memory.arena import Arena
from vericache_sglang.memory.complement import RawComplement
from vericache_sglang.memory.parked import ParkedImage
from vericache_sglang.memory.segmented import SegmentedComplement

seeds = st.integers(0, 10**6)

counted = st.sampled_from([(16,), (7, 9), (1, 4, 4, 7), (5, 1, 10)])
"""Slots of a complement's segments; they cut the lease's spans, or fit them."""


@settings(max_examples=60)
@given(seed=seeds, counts=counted)
def test_a_copy_waits_for_the_forward_before_and_the_forward_behind_for_it(
    seed, counts
):
    with opened(seed) as link:
        complement = new_complement(counts)
        before = [at(link.pool, layer, PLACES) for layer in range(LAYERS)]
        link.launch(*range(LAYERS))
        transfer = link.copies.start(complement, LEASE, NO_DRAFTS)
        link.clock.run(seed % 7)
        for layer in range(LAYERS):
            transfer.await_layer(layer)
            link.launch(layer)
        link.finish(transfer)
        assert link.read[:LAYERS] == before
        after = [wanted(complement, layer) for layer in range(LAYERS)]
        assert link.read[LAYERS:] == after
        others = [i for i in range(POOL) if i not in PLACES]
        fresh = new_pool()
        for layer in range(LAYERS):
            assert at(link.pool, layer, others) == at(fresh, layer, others)
        assert transfer.nbytes == 16 * GEOMETRY.token_bytes
        assert (transfer.layers_done, transfer.seconds > 0) == (LAYERS, True)


def test_a_forward_that_does_not_wait_can_read_what_was_there_before():
    """The device would show it: in some order the layer is not there yet."""
    seen = set()
    for seed in range(40):
        with opened(seed) as link:
            complement = new_complement((16,))
            transfer = link.copies.start(complement, LEASE, NO_DRAFTS)
            until(transfer.future.done)
            link.clock.run(seed)
            link.launch(LAYERS - 1)
            link.finish(transfer)
            seen.add(link.read[0] == wanted(complement, LAYERS - 1))
    assert seen == {True, False}


@settings(max_examples=40)
@given(seed=seeds)
def test_a_copy_is_done_when_the_device_is_and_layers_count_as_they_arrive(seed):
    with opened(seed) as link:
        complement = new_complement((7, 9))
        transfer = link.copies.start(complement, LEASE, NO_DRAFTS)
        until(transfer.future.done)
        assert not transfer.done()
        assert (transfer.layers_done, transfer.layer_s) == (0, 0.0)
        seen = [0]
        while link.clock.step():
            seen.append(transfer.layers_done)
            for layer in range(transfer.layers_done):
                assert at(link.pool, layer, PLACES) == wanted(complement, layer)
        assert seen == sorted(seen)
        assert seen[-1] == LAYERS
        assert transfer.done()
        # 4 pieces and a mark a layer, a millisecond each.
        assert transfer.layer_s == pytest.approx(transfer.seconds / LAYERS, rel=0.2)


@settings(max_examples=40)
@given(seed=seeds, steps=st.integers(0, 12))
def test_after_a_cancel_nothing_is_written_any_more(seed, steps):
    with opened(seed) as link:
        complement = new_complement((16,))
        transfer = link.copies.start(complement, LEASE, NO_DRAFTS)
        link.clock.run(steps)
        transfer.cancel()
        for buffer in (*link.pool[0], *link.pool[1]):
            buffer.zero_()  # somebody else's now
        link.clock.drain()
        assert not any(b.any() for b in (*link.pool[0], *link.pool[1]))
        transfer.cancel()
        if transfer.layers_done < LAYERS:
            with pytest.raises(TransferError, match="cancelled"):
                transfer.done()


def test_a_cancel_keeps_later_layers_from_being_queued(monkeypatch):
    reached, go_on = threading.Event(), threading.Event()
    verify = RawComplement.verify

    def slow(self, layer):
        if layer == 1:
            reached.set()
            assert go_on.wait(20)
        verify(self, layer)

    monkeypatch.setattr(RawComplement, "verify", slow)
    with opened(3) as link:
        transfer = link.copies.start(new_complement((16,)), LEASE, NO_DRAFTS)
        assert reached.wait(20)
        other = threading.Thread(target=transfer.cancel)
        other.start()
        until(transfer._stopped.is_set)
        go_on.set()
        while other.is_alive():
            link.clock.step()
        with pytest.raises(TransferError, match="cancelled in layer 2"):
            transfer.done()
        assert transfer.layers_done == 2


@pytest.mark.parametrize("damaged", range(LAYERS))
@pytest.mark.parametrize("counts", [(16,), (5, 1, 10)])
def test_a_damaged_layer_is_never_sent_and_who_waits_for_it_hears(damaged, counts):
    with opened(damaged) as link:
        complement = new_complement(counts)
        before = at(link.pool, damaged, PLACES)
        last = complement.images[-1]
        last.values.view(torch.uint8)[damaged, -1, 0, 0] ^= 1
        transfer = link.copies.start(complement, LEASE, NO_DRAFTS)
        for layer in range(damaged):
            transfer.await_layer(layer)
        for layer in range(damaged, LAYERS):
            with pytest.raises(TransferError, match=f"differs in layer {damaged}"):
                transfer.await_layer(layer)
        link.clock.drain()
        with pytest.raises(TransferError, match=f"differs in layer {damaged}"):
            transfer.done()
        transfer.cancel()
        assert transfer.layers_done == damaged
        assert at(link.pool, damaged, PLACES) == before
        for layer in range(damaged):
            assert at(link.pool, layer, PLACES) == wanted(complement, layer)
        last.values.view(torch.uint8)[damaged, -1, 0, 0] ^= 1
        link.finish(link.copies.start(complement, LEASE, NO_DRAFTS))
        assert at(link.pool, damaged, PLACES) == wanted(complement, damaged)


@settings(max_examples=60)
@given(seed=seeds, counts=counted)
def test_what_is_saved_is_what_was_gathered_and_comes_back(seed, counts):
    with opened(seed) as link:
        made = [RawComplement(GEOMETRY, n, 1, DTYPE) for n in counts]
        image = made[0] if len(made) == 1 else SegmentedComplement(made)
        for each in made:
            each.kept.zero_()
        saved = link.copies.save(leaving(link, seed), image)
        back = link.copies.start(image, LEASE, NO_DRAFTS)  # sealed by then
        while not (saved.future.done() and back.future.done()):
            link.clock.step()
        link.finish(saved)
        link.finish(back)
        assert image.sealed
        for layer in range(LAYERS):
            gathered = [
                bits(
                    scramble(
                        torch.zeros(16, 2, dim, dtype=DTYPE), seed + 10 * layer + i
                    )
                )
                for i, dim in enumerate((4, 6))
            ]
            assert wanted(image, layer) == tuple(gathered)
            assert at(link.pool, layer, PLACES) == tuple(gathered)


@settings(max_examples=30)
@given(seed=seeds)
def test_a_parked_image_comes_back_into_any_slots(seed):
    with opened(seed) as link:
        image = filled(ParkedImage(GEOMETRY, 16, DTYPE))
        slots = torch.tensor(PLACES[::-1])
        link.launch(*range(LAYERS))
        before = [at(link.pool, layer, PLACES) for layer in range(LAYERS)]
        transfer = link.copies.restore(image, slots)
        assert any(slots is each for each in link.clock.recorded)
        transfer.await_layer(LAYERS - 1)
        link.launch(*range(LAYERS))
        link.finish(transfer)
        assert link.read[:LAYERS] == before
        for layer, (keys, values) in enumerate(link.read[LAYERS:]):
            assert (keys[::-1], values[::-1]) == wanted(image, layer)


# -- host memory while the device uses it ------------------------------------------


@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("counts", [(16,), (7, 9)])
def test_bytes_that_are_given_back_stay_until_the_copy_has_ended(way, counts):
    arena = Arena(1 << 14, pinned=False)
    with opened(3) as link:
        complement = new_complement(counts, arena)
        size = arena.used_bytes
        if way == "in":
            content = wanted(complement, LAYERS - 1)
            transfer = link.copies.start(complement, LEASE, NO_DRAFTS)
        else:
            transfer = link.copies.save(leaving(link, 5), complement)
        for image in complement.images:
            image.free()
        assert arena.used_bytes == arena.leaving_bytes == size
        left = arena.take(arena.free_bytes, held=True)
        scramble(left.view(torch.uint8, (left.size,)), 4)
        if way == "in":
            until(transfer.future.done)
        while not transfer.future.done():
            link.clock.step()
        link.finish(transfer)
        assert arena.leaving_bytes == 0
        assert arena.used_bytes == left.size
        if way == "in":
            assert at(link.pool, LAYERS - 1, PLACES) == content
        arena.check()


@pytest.mark.parametrize("how", ["cancelled", "damaged", "not taken"])
def test_a_copy_that_ends_badly_lets_go_of_its_bytes_too(how):
    arena = Arena(1 << 14, pinned=False)
    with opened(3) as link:
        complement = new_complement((7, 9), arena)
        if how == "damaged":
            complement.images[1].keys.view(torch.uint8)[1, 0, 0, 0] ^= 1
        if how == "not taken":
            link.copies.close()
            with pytest.raises(RuntimeError, match="shutdown"):
                link.copies.start(complement, LEASE, NO_DRAFTS)
        else:
            transfer = link.copies.start(complement, LEASE, NO_DRAFTS)
            transfer.cancel()
        for image in complement.images:
            image.free()
        assert arena.used_bytes == 0
        arena.check()


def test_a_save_that_fails_half_way_waits_for_its_copies_and_lets_go():
    arena = Arena(1 << 14, pinned=False)

    def broken(link):
        blocks = leaving(link, 5)
        yield next(blocks)
        raise RuntimeError("a selector's own")

    with opened(3) as link:
        complement = new_complement((7, 9), arena)
        with pytest.raises(RuntimeError, match="a selector's own"):
            link.copies.save(broken(link), complement)
        assert not any(stream.work for stream in link.clock.streams[1:])
        for image in complement.images:
            image.free()
        assert arena.used_bytes == 0


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_save_has_no_more_bytes_in_flight_than_it_may(layers, monkeypatch):
    each = 16 * GEOMETRY.token_bytes // LAYERS
    monkeypatch.setattr(stream_transfers, "IN_FLIGHT", layers * each + 1)
    with opened(3) as link:
        image = RawComplement(GEOMETRY, 16, 1, DTYPE)
        image.kept.zero_()
        most, ended = [], []

        def blocks():
            for layer, pair in enumerate(leaving(link, 5)):
                yield pair
                stream = link.copies._stream
                stream.put(lambda layer=layer: ended.append(layer))
                most.append(layer + 1 - len(ended))

        transfer = link.copies.save(blocks(), image)
        while not transfer.future.done():
            link.clock.step()
        link.finish(transfer)
        assert max(most) <= layers + 1
        assert image.sealed
