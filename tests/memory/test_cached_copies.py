"""Cached segments leave the device and come back while it does something else."""

import threading

import pytest
import torch
from hypothesis import given, settings
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
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.thread_transfers import ThreadTransfers
from vericache_sglang.prefix_cache.host_pool import SegmentPool

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


def new_store(nbytes=1 << 14, pinned=False):
    page_pool = HostPagePool(nbytes, 96, pinned)
    return page_pool, SegmentPool(page_pool)


def finish(link, future):
    while not future.done():
        link.clock.step()
    link.clock.drain()


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_a_segment_is_saved_late_and_comes_back_into_any_slots(seed):
    with opened(seed) as link:
        page_pool, store = new_store(pinned=True)
        image = store.open("s", GEOMETRY, 16, DTYPE, SCORES)
        transfer = link.copies.save(leaving(link, seed), image)
        assert "s" in store
        other = store.put("t", {"x": torch.zeros(4, 10)})
        finish(link, transfer.future)
        assert transfer.done()
        found = store.get("s")
        assert bits(found["keys"].read()) == saved_entries(seed)["keys"]
        assert bits(found["values"].read()) == saved_entries(seed)["values"]
        assert torch.equal(found["noted"].read(), SCORES["noted"])
        slots = link.clock.put(torch.tensor(PLACES))
        pairs = zip(found["keys"], found["values"], strict=True)
        link.launch(*range(LAYERS))
        before = [at(link.pool, layer, PLACES) for layer in range(LAYERS)]
        link.copies.bring(pairs, slots, [store.pages("s")])
        link.launch(*range(LAYERS))
        store.drop("s")
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
        assert (other, page_pool.leaving_bytes) == (True, 0)
        store.check()


def test_who_asks_for_a_segment_on_its_way_waits_for_it():
    with opened(5) as link:
        _, store = new_store(pinned=True)
        image = store.open("s", GEOMETRY, 16, DTYPE)
        transfer = link.copies.save(leaving(link, 5), image)
        found = []
        reader = threading.Thread(target=lambda: found.append(store.get("s")))
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
        assert not found
        finish(link, transfer.future)
        reader.join(20)
        assert bits(found[0]["keys"].read()) == saved_entries(5)["keys"]
        assert store.checksum_failures == 0


def test_a_segment_that_is_dropped_on_its_way_is_nobody_elses_until_it_ended():
    with opened(5) as link:
        page_pool, store = new_store(pinned=True)
        image = store.open("s", GEOMETRY, 16, DTYPE)
        transfer = link.copies.save(leaving(link, 5), image)
        store.drop("s")
        rest = page_pool.take(page_pool.free_bytes)
        mine = [scramble(block, 4).clone() for block in rest.blocks(0, rest.nbytes)]
        finish(link, transfer.future)
        for block, before in zip(rest.blocks(0, rest.nbytes), mine, strict=True):
            assert torch.equal(block, before)
        assert (page_pool.leaving_bytes, page_pool.used_bytes) == (0, rest.nbytes)
        assert store.get("s") is None


def test_damage_after_the_copy_is_noticed():
    with opened(5) as link:
        _, store = new_store(pinned=True)
        image = store.open("s", GEOMETRY, 16, DTYPE)
        finish(link, link.copies.save(leaving(link, 5), image).future)
        image.tensors["values"].raw(2)[-1][-1] ^= 1
        assert store.get("s") is None
        assert store.checksum_failures == 1


@pytest.mark.parametrize("way", ["stream", "thread"])
def test_what_its_maker_raises_is_raised_and_lets_go(way):

    def broken(found):
        yield found["keys"][0], found["values"][0]
        raise TransferError("a copy is damaged")

    with opened(5) as link:
        page_pool, store = new_store(pinned=True)
        copies = link.copies if way == "stream" else ThreadTransfers(*new_pool(), 0.0)
        image = store.open("s", GEOMETRY, 16, DTYPE)
        finish(link, link.copies.save(leaving(link, 5), image).future)
        found, slots = store.get("s"), torch.tensor(PLACES)
        slots = link.clock.put(slots) if way == "stream" else slots
        with pytest.raises(TransferError, match="a copy is damaged"):
            copies.bring(broken(found), slots, [store.pages("s")])
        with pytest.raises(InvariantError, match="0 layers to save of 3"):
            copies.bring([], slots, [store.pages("s"), None])
        store.drop("s")
        link.clock.drain()
        copies.close()
        assert page_pool.used_bytes == 0


def test_without_a_device_it_is_there_at_once():
    _, store = new_store()
    pool = new_pool()
    link = ThreadTransfers(*pool, 0.0)
    image = store.open("s", GEOMETRY, 16, DTYPE, SCORES)
    pairs = [
        tuple(
            scramble(torch.zeros(16, 2, dim, dtype=DTYPE), 7 + 10 * layer + i)
            for i, dim in enumerate((4, 6))
        )
        for layer in range(LAYERS)
    ]
    saved = link.save(pairs, image)
    assert saved.nbytes == 16 * GEOMETRY.token_bytes
    found = store.get("s")
    link.bring(
        zip(found["keys"], found["values"], strict=True), torch.tensor(PLACES), []
    )
    for layer in range(LAYERS):
        kept = saved_entries(7)
        wanted = kept["keys"][layer], kept["values"][layer]
        assert at(pool, layer, PLACES) == wanted
    link.close()


def test_a_segment_of_which_a_layer_is_missing_is_not_returned():
    _, store = new_store()
    image = store.open("s", GEOMETRY, 16, DTYPE)
    for layer in range(LAYERS - 1):
        image.write(layer, image.keys[layer].clone(), image.values[layer].clone())
    assert store.get("s") is None
    assert store.names() == []


def test_a_name_is_opened_once_and_needs_room():
    page_pool, store = new_store(4096)
    assert store.open("s", GEOMETRY, 16, DTYPE) is not None
    with pytest.raises(InvariantError, match="segment s is opened a second time"):
        store.open("s", GEOMETRY, 16, DTYPE)
    assert store.open("t", GEOMETRY, 1000, DTYPE) is None
    assert list(store.names()) == ["s"]
    store.drop("s")
    assert page_pool.used_bytes == 0
