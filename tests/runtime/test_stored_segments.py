"""Cached segments over a store: written as they are made, taken in as they come."""

import pytest
import torch
from segment_world import (
    IDENTITY,
    KEPT,
    SHORT,
    SegmentWorld,
    fetched,
    shorten_segments,
    with_segments,
)

from vericache_sglang.compression.budget import Budget
from vericache_sglang.prefix_cache.segment import Form

pytestmark = pytest.mark.sglang

MODEL, COMPRESSOR = IDENTITY


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch)
    monkeypatch.setattr(SegmentWorld, "nans", False)


def stored_split(world, store, name, compressor=COMPRESSOR):
    """Have a segment's two parts stored, as another server does."""
    world.split(name)
    parts = zip(("draft", "residual"), world.copies.read_parts(name), strict=True)
    assert store.put(name, dict(parts), compressor)


def take_in(world, store, name, parent=None):
    """Have a segment taken in that the store has."""
    found = store.restore(name, [COMPRESSOR])
    return world.segments.take_in(name, parent, found)


def test_a_segment_of_the_tree_is_stored_and_fetched_by_another_server():
    world, store = with_segments()
    slots = world.write_text(["a", "ab"])
    world.segments.register(["a", "ab"], slots)
    store.announce()
    assert store.names == ["a", "ab"]
    other, same = with_segments(storage=store.storage)
    other.segments.stored.fetch("r", ["a", "ab", "abc"], 0)
    same.arrive()
    assert fetched(other.segments, "r")
    assert other.segments.reach(["a", "ab", "abc"], 0) == 16
    target = other.take(16)
    assert other.segments.restore(["a", "ab"], 0, target) == []
    for at, name in enumerate(["a", "ab"]):
        own = target[at * SHORT : (at + 1) * SHORT]
        assert torch.equal(other.at(own), world.truth(name))


def test_a_split_segment_is_stored_in_two_parts():
    world, store = with_segments()
    world.segments.kept = KEPT
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots)
    assert store.waiting == 0
    world.split("a")
    world.segments.settle(["a"])
    store.announce()
    assert store.lookup_compressed(["a"], COMPRESSOR) == 1
    other, same = with_segments(storage=store.storage)
    assert take_in(other, same, "a")
    target = other.take(SHORT)
    assert other.segments.restore(["a"], 0, target) == []
    assert torch.equal(other.at(target), world.truth("a"))


def test_a_segment_whose_copy_runs_is_stored_when_its_use_ends():
    """As on a CUDA device, where compressing ends before the copy to the host does."""
    world, store = with_segments()
    world.segments.kept = KEPT
    world.index.add_draft("a", world.draft("a"))
    filling = world.copies.open_residual("a", Budget(SHORT, KEPT, 0, 0))
    world.segments.settle(["a"])
    world.segments.use("r", ["a"])
    store.announce()
    assert store.names == []
    world.fill("a", filling)
    world.segments.release("r")
    store.announce()
    assert store.lookup_compressed(["a"], COMPRESSOR) == 1


def test_a_write_that_failed_is_made_again_when_the_server_ends():
    world, store = with_segments()
    world.segments.kept = KEPT
    world.split("a")
    store.storage.fault = "refuse"
    world.segments.settle(["a"])
    store.announce()
    store.storage.fault = None
    assert store.names == []
    world.segments.close()
    assert store.lookup_compressed(["a"], COMPRESSOR) == 1


def test_a_segment_without_the_one_before_it_is_not_taken_in():
    world, store = with_segments()
    stored_split(world, store, "ab")
    other, same = with_segments(storage=store.storage)
    assert not take_in(other, same, "ab", "a")
    assert other.page_pool.used_bytes == 0


def test_parts_of_another_compressor_are_taken_in_as_a_whole():
    world, store = with_segments()
    stored_split(world, store, "a", "keeps other tokens")
    other, same = with_segments(storage=store.storage)
    assert take_in(other, same, "a")
    assert other.index.find("a").has(Form.WHOLE)
    assert other.segments.residual("a") is None
    target = other.take(SHORT)
    assert other.segments.restore(["a"], 0, target) == []
    assert torch.equal(other.at(target), world.truth("a"))


def test_without_room_on_the_host_a_stored_segment_stays_in_the_store():
    world, store = with_segments(host=256)
    whole = {name: torch.zeros(2, 8, 2, 4) for name in ("keys", "values")}
    assert store.put("a", {"whole": whole})
    assert not take_in(world, store, "a")
    assert world.page_pool.used_bytes == 0
    assert world.segments.reach(["a"], 0) == 0
    world.segments.check()


def test_what_fails_while_it_is_taken_in_leaves_nothing_behind(monkeypatch):
    """Draft KV is on the host already when its residual KV fails."""
    world, store = with_segments()
    stored_split(world, store, "a")
    other, same = with_segments(storage=store.storage)
    other.segments.kept = KEPT
    monkeypatch.setattr(other.copies, "save_scores", lambda *_: 1 / 0)
    other.segments.stored.fetch("r", ["a"], 0)
    same.arrive()
    assert fetched(other.segments, "r")
    assert other.segments.stored.pop("r") == (0, None)
    assert other.page_pool.used_bytes == 0
    assert other.segments.reach(["a"], 0) == 0
    other.segments.check()


def test_what_is_on_the_device_only_is_written_when_the_server_ends():
    world, store = with_segments()
    world.segments.kept = KEPT
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots)
    world.segments.close()
    assert store.names == ["a"]
    assert store.put_later("b", {}) is None, "it is closed"


def test_a_segment_whose_residual_kv_is_referred_to_is_not_taken_in_twice():
    """A request that was swapped out refers to it; its draft KV had to leave."""
    world, store = with_segments()
    stored_split(world, store, "a")
    world.segments.refer("swapped out", ["a"])
    world.give(world.index.remove_draft("a").slots)
    used = world.page_pool.used_bytes
    assert not take_in(world, store, "a")
    assert world.page_pool.used_bytes == used
    world.segments.release("swapped out")
    assert take_in(world, store, "a")
    assert world.segments.reach(["a"], 0) == SHORT
