"""Cached segments leave the device and come back while it does something else."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_tensors import CUDA
from stream_link import (
    DTYPE,
    GEOMETRY,
    LAYERS,
    PLACES,
    at,
    bits,
    leaving,
    new_pool,
    opened,
    scramble,
)

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.host_image import shapes_of
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.thread_transfers import ThreadTransfers
from vericache_sglang.prefix_cache.segment_images import (
    SegmentImage,
    shapes_of_tensors,
)

SCORES = {"noted": torch.arange(6.0).view(3, 2)}


def saved_entries(seed):
    """What ``leaving`` yields, as an entry of the pool holds it: [L, 16, H, D]."""
    sides = [
        [
            bits(scramble(torch.zeros(16, 2, dim, dtype=DTYPE), seed + 10 * layer + i))
            for layer in range(LAYERS)
        ]
        for i, dim in enumerate((4, 6))
    ]
    return dict(zip(("keys", "values"), sides, strict=True))


def intact(image):
    """Return whether every layer matches its checksum; waits for a running save."""
    try:
        for layer in range(image.layers):
            image.verify(layer)
    except TransferError:
        return False
    return True


def new_pages(nbytes=1 << 14, pinned=False):
    return HostPagePool(nbytes, 96, pinned)


def new_image(page_pool, more=None, slots=16):
    """Allocate an image as a save does, with its scores in place."""
    shapes = {**shapes_of(GEOMETRY, slots, DTYPE), **shapes_of_tensors(more or {})}
    image = SegmentImage.allocated(shapes, page_pool)
    for field, tensor in (more or {}).items():
        image.tensors[field].write(tensor)
    return image


def finish(link, future):
    while not future.done():
        link.clock.step()
    link.clock.drain()


@given(seed=st.integers(0, 10**6))
def test_a_segment_is_saved_late_and_comes_back_into_any_slots(seed):
    with opened(seed) as link:
        page_pool = new_pages(pinned=True)
        image = new_image(page_pool, SCORES)
        transfer = link.copies.save(leaving(link, seed), image)
        other = SegmentImage.copied({"x": torch.zeros(4, 10)}, page_pool)
        finish(link, transfer.future)
        assert transfer.done()
        assert intact(image)
        found = image.tensors
        assert bits(found["keys"].read()) == saved_entries(seed)["keys"]
        assert bits(found["values"].read()) == saved_entries(seed)["values"]
        assert torch.equal(found["noted"].read(), SCORES["noted"])
        slots = link.clock.put(torch.tensor(PLACES))
        pairs = zip(found["keys"], found["values"], strict=True)
        link.launch(*range(LAYERS))
        before = [at(link.pool, layer, PLACES) for layer in range(LAYERS)]
        link.copies.bring(pairs, slots, [image.pages])
        link.launch(*range(LAYERS))
        image.free()
        others = [(torch.zeros(4, 2, 4), torch.zeros(4, 2, 6))] * LAYERS
        others = [tuple(e.to(DTYPE).pin_memory() for e in pair) for pair in others]
        link.copies.bring(others, torch.arange(50, 54, device=CUDA), [])
        assert page_pool.leaving_bytes, "its bytes have not been read yet"
        rest = page_pool.take(page_pool.free_bytes)
        for block in rest.blocks(0, rest.nbytes):
            scramble(block, 4)
        link.clock.drain()
        assert link.read[:LAYERS] == before
        after = saved_entries(seed)
        assert link.read[LAYERS:] == list(
            zip(after["keys"], after["values"], strict=True)
        )
        link.copies.close()
        assert page_pool.leaving_bytes == 0
        assert intact(other)
        page_pool.check()


def test_who_asks_for_a_segment_on_its_way_waits_for_it():
    with opened(5) as link:
        image = new_image(new_pages(pinned=True))
        transfer = link.copies.save(leaving(link, 5), image)
        found = []
        reader = threading.Thread(target=lambda: found.append(intact(image)))
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
        assert not found
        finish(link, transfer.future)
        reader.join(120)
        assert found == [True]
        assert bits(image.tensors["keys"].read()) == saved_entries(5)["keys"]


def test_a_segment_that_is_dropped_on_its_way_is_nobody_elses_until_it_ended():
    with opened(5) as link:
        page_pool = new_pages(pinned=True)
        image = new_image(page_pool)
        transfer = link.copies.save(leaving(link, 5), image)
        image.free()
        rest = page_pool.take(page_pool.free_bytes)
        mine = [scramble(block, 4).clone() for block in rest.blocks(0, rest.nbytes)]
        finish(link, transfer.future)
        for block, before in zip(rest.blocks(0, rest.nbytes), mine, strict=True):
            assert torch.equal(block, before)
        assert (page_pool.leaving_bytes, page_pool.used_bytes) == (0, rest.nbytes)


def test_damage_after_the_copy_is_noticed():
    with opened(5) as link:
        image = new_image(new_pages(pinned=True))
        finish(link, link.copies.save(leaving(link, 5), image).future)
        image.tensors["values"].raw(2)[-1][-1] ^= 1
        assert not intact(image)


@pytest.mark.parametrize("way", ["stream", "thread"])
def test_what_its_maker_raises_is_raised_and_lets_go(way):

    def broken(found):
        yield found["keys"][0], found["values"][0]
        raise TransferError("a copy is damaged")

    with opened(5) as link:
        page_pool = new_pages(pinned=True)
        copies = link.copies if way == "stream" else ThreadTransfers(*new_pool(), 0.0)
        image = new_image(page_pool)
        finish(link, link.copies.save(leaving(link, 5), image).future)
        found, slots = image.tensors, torch.tensor(PLACES)
        slots = link.clock.put(slots) if way == "stream" else slots
        with pytest.raises(TransferError, match="a copy is damaged"):
            copies.bring(broken(found), slots, [image.pages])
        with pytest.raises(InvariantError, match="0 layers to save of 3"):
            copies.bring([], slots, [image.pages, None])
        image.free()
        link.clock.drain()
        copies.close()
        assert page_pool.used_bytes == 0


def test_without_a_device_it_is_there_at_once():
    pool = new_pool()
    link = ThreadTransfers(*pool, 0.0)
    image = new_image(new_pages(), SCORES)
    pairs = [
        tuple(
            scramble(torch.zeros(16, 2, dim, dtype=DTYPE), 7 + 10 * layer + i)
            for i, dim in enumerate((4, 6))
        )
        for layer in range(LAYERS)
    ]
    saved = link.save(pairs, image)
    assert saved.nbytes == 16 * GEOMETRY.token_bytes
    assert intact(image)
    found = image.tensors
    link.bring(
        zip(found["keys"], found["values"], strict=True), torch.tensor(PLACES), []
    )
    for layer in range(LAYERS):
        kept = saved_entries(7)
        wanted = kept["keys"][layer], kept["values"][layer]
        assert at(pool, layer, PLACES) == wanted
    link.close()


def test_a_segment_of_which_a_layer_is_missing_is_not_returned():
    image = new_image(new_pages())
    for layer in range(LAYERS - 1):
        image.write(layer, image.keys[layer].clone(), image.values[layer].clone())
    assert not intact(image)


def test_an_image_needs_room():
    page_pool = new_pages(4096)
    image = new_image(page_pool)
    used = page_pool.used_bytes
    assert SegmentImage.allocated(shapes_of(GEOMETRY, 1000, DTYPE), page_pool) is None
    assert page_pool.used_bytes == used
    image.free()
    assert page_pool.used_bytes == 0
