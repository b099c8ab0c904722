"""What the store alone has is known and priced, and comes back by a fetch."""

from dataclasses import replace

import pytest
import torch
from segment_world import (
    IDENTITY,
    KEPT,
    PRICES,
    SHORT,
    FakeStore,
    SegmentWorld,
    shorten_segments,
    with_segments,
)

from vericache_sglang.engine.stored_segments import StoredSegments
from vericache_sglang.store.payload import About
from vericache_sglang.tiers.segment import Tier

COMPRESSOR = IDENTITY.compressor
SPACE = (None, "salt")


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch)


def restored_scores(world, name):
    """Bring a segment back; return what its tokens scored now."""
    target = world.take(SHORT)
    assert world.segments.restore([name], 0, target) is None
    assert torch.equal(world.at(target), world.truth(name))
    return torch.stack(world.scores.noted(target))


def left_device(world, store, names):
    """Have a text computed, stored, and evicted from the device."""
    slots = world.write_text(names)
    world.segments.register(names, slots, SPACE, range(len(slots)))
    store.announce()
    world.segments.leaving(slots)
    world.give(slots)


def tokens_by_tier(world):
    report = world.segments.report()
    return report["cache_host_tokens"], report["cache_store_tokens"]


def test_what_was_announced_leaves_the_host_for_the_store_and_is_still_known():
    world, store = with_segments()
    left_device(world, store, ["a", "ab"])
    assert tokens_by_tier(world) == (2 * SHORT, 0)
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, 2 * SHORT)
    report = world.segments.report()
    assert report["cache_store_bytes"] == 2 * SHORT * 64 * 2
    assert world.arena.used_bytes == 0
    assert world.segments.reach(["a", "ab"], 0) == 0, "only a fetch brings it back"
    world.segments.check()


def test_a_write_that_did_not_end_is_nothing_to_rely_on():
    world, store = with_segments()
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots, SPACE, range(SHORT))
    world.segments.leaving(slots)
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, 0)
    store.announce()  # too late: it is not known any more
    assert tokens_by_tier(world) == (0, 0)


def test_what_failed_to_be_written_is_not_in_the_store():
    world, store = with_segments()
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots, SPACE, range(SHORT))
    store.writes.pop("a").set_exception(OSError("full"))
    world.segments.leaving(slots)
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, 0)


def test_what_is_in_the_store_leaves_before_what_is_nowhere_else():
    world, store = with_segments()
    left_device(world, store, ["a"])
    store.full = True
    left_device(world, store, ["b"])
    for _ in range(3):  # "a" is used more, but costs only a fetch
        world.segments.register(["a"], world.take(SHORT), SPACE, range(SHORT))
        world.segments.leaving(world.segments._slots.all()[0].slots)
    world.segments.make_room(1)
    assert tokens_by_tier(world) == (SHORT, SHORT)
    assert world.copies.has_whole("b")
    world.segments.make_room(1)
    assert tokens_by_tier(world) == (0, SHORT)


def test_a_store_slower_than_a_prefill_is_nothing_to_remember():
    world, store = with_segments()
    world.segments._prices = lambda: replace(PRICES, store_s_per_byte=1.0)
    left_device(world, store, ["a"])
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, 0)


@pytest.mark.parametrize("split", [False, True])
def test_what_the_store_alone_has_comes_back_by_a_fetch(split):
    world, store = with_segments()
    world.segments.kept = KEPT if split else 0
    slots = world.write_text(["a", "ab"])
    world.segments.register(["a", "ab"], slots, SPACE, range(2 * SHORT))
    if split:
        for name in ("a", "ab"):
            world.split(name)
        world.segments.settle(["a", "ab"])
    store.announce()
    world.segments.leaving(slots)
    world.give(slots)
    world.segments.make_room(10**9)
    assert len(world.copies.shelf) == world.arena.used_bytes == 0
    assert tokens_by_tier(world) == (0, 2 * SHORT)
    world.segments.stored.fetch("r", ["a", "ab"], 0)
    store.arrive()
    assert world.segments.stored.fetched("r")
    assert tokens_by_tier(world) == (2 * SHORT, 0)
    assert world.copies.has_draft_on_host("a") is split
    for name in ("a", "ab"):
        assert torch.equal(restored_scores(world, name), world.truth_scores(name))
    world.segments.check()


def test_what_the_store_has_no_more_is_forgotten():
    world, store = with_segments()
    left_device(world, store, ["a", "ab"])
    world.segments.make_room(10**9)
    del store.objects["a"]
    world.segments.stored.fetch("r", ["a", "ab"], 0)
    store.arrive()
    assert world.segments.stored.fetched("r")
    assert tokens_by_tier(world) == (0, SHORT), "nobody asked for the second"
    world.segments.check()


def test_a_text_computed_again_is_on_the_device_and_written_no_more():
    world, store = with_segments()
    left_device(world, store, ["a"])
    world.segments.make_room(10**9)
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots, SPACE, range(SHORT))
    assert store.writes == {}
    assert world.segments._index.get("a").content.is_in(Tier.DEVICE)
    world.segments.leaving(slots)
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, SHORT), "the store has it all the while"


def test_the_segments_known_in_the_store_are_bounded(monkeypatch):
    monkeypatch.setattr("vericache_sglang.engine.segment_room.MOST_STORED", 3)
    world, store = with_segments()
    for name in "abcde":
        left_device(world, store, [name])
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, 3 * SHORT)
    assert len(world.segments.stored._about) == 0
    assert {n for n in "abcde" if n in world.segments.stored} == set("cde")


def test_after_new_weights_the_store_has_nothing():
    world, store = with_segments()
    left_device(world, store, ["a"])
    world.segments.make_room(10**9)
    left_device(world, store, ["b"])
    world.segments.leave_store()
    assert tokens_by_tier(world) == (SHORT, 0)
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, 0)
    world.segments.check()


def test_a_part_that_a_request_lists_is_not_left_to_the_store():
    world, store = with_segments()
    world.segments.kept = KEPT
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots, SPACE, range(SHORT))
    world.copies.shelf.add("a", world.draft("a"))
    world.segments.use("r", ["a"])  # before its complement is there
    store.put_later("a", {"whole": {}}, About((1,), "p", SPACE))
    world.segments.leaving(slots)
    world.segments.make_room(10**9)
    assert world.copies.shelf.get("a").users == 1
    world.segments.release("r")
    world.segments.evict_drafts(99)
    world.segments.make_room(10**9)
    assert world.arena.used_bytes == len(world.copies.shelf) == 0


# -- parts that were made offline ---------------------------------------------------


def split_elsewhere(store, compressor, kept):
    """Have another process store segment ``a`` in two parts, and return its world."""
    world = SegmentWorld()
    world.kept = lambda name: kept
    world.split("a")
    about = About((1,), "p", SPACE, compressor)
    parts = zip(("draft", "rest"), world.copies.read_parts("a"), strict=True)
    store.put_later("a", dict(parts), about)
    return world


FIRST = torch.arange(KEPT, dtype=torch.int32).expand(2, 2, -1)


def test_better_parts_are_taken_as_they_are_and_not_written_again():
    world, store = SegmentWorld(), FakeStore("better", COMPRESSOR)
    segments = world.segments
    segments.stored = StoredSegments(store, COMPRESSOR, segments.take_in, ["better"])
    segments.kept = KEPT
    other = split_elsewhere(store, "better", FIRST)
    segments.stored.describe(["a"], SPACE, range(SHORT))
    segments.stored.fetch("r", ["a"], 0)
    store.arrive()
    assert segments.stored.fetched("r")
    assert torch.equal(world.pool.get("a.draft")["kept"], FIRST)
    assert not segments.stored.wants_split("a")
    target = world.take(SHORT)
    assert segments.restore(["a"], 0, target) is None
    assert torch.equal(world.at(target), other.truth("a"))


@pytest.mark.parametrize("why", ["unknown compressor", "another count"])
def test_parts_that_do_not_fit_are_joined(why):
    world, store = with_segments()
    world.segments.kept = KEPT
    by, count = ("x", KEPT) if why == "unknown compressor" else (COMPRESSOR, KEPT + 1)
    kept = torch.arange(count, dtype=torch.int32).expand(2, 2, -1)
    other = SegmentWorld()
    other.kept = lambda name: kept
    rows = other.of("a", kept), other.of("a", other.away("a"))
    both = [bits.view(torch.float32) for bits in rows]
    draft, rest = ({"keys": kv[:, 0], "values": kv[:, 1]} for kv in both)
    about = About((1,), "p", SPACE, by)
    store.put_later("a", {"draft": {**draft, "kept": kept}, "rest": rest}, about)
    assert world.segments.take_in("a", None, store.objects["a"])
    assert world.copies.has_whole("a")
    assert len(world.complements) == 0
    target = world.take(SHORT)
    assert world.segments.restore(["a"], 0, target) is None
    assert torch.equal(world.at(target), other.truth("a"))
