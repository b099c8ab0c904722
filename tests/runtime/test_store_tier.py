"""What the store alone has is known and priced, and comes back by a fetch."""

from dataclasses import replace

import pytest
import torch
from segment_world import (
    IDENTITY,
    KEPT,
    PRICES,
    SHORT,
    SegmentWorld,
    fetched,
    shorten_segments,
    tiers_of,
    with_segments,
)

from vericache_sglang.prefix_cache.segment import Form, Tier

COMPRESSOR = IDENTITY.compressor


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch)
    monkeypatch.setattr(SegmentWorld, "nans", False)


def restored_scores(world, name):
    """Bring a segment back; return what its tokens scored now."""
    target = world.take(SHORT)
    assert world.segments.restore([name], 0, target) == []
    assert torch.equal(world.at(target), world.truth(name))
    return torch.stack(world.scores.noted(target))


def left_device(world, store, names):
    """Have a text computed, stored, and evicted from the device."""
    slots = world.write_text(names)
    world.segments.register(names, slots)
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
    assert world.page_pool.used_bytes == 0
    assert world.segments.reach(["a", "ab"], 0) == 0, "only a fetch brings it back"
    world.segments.check()


def test_a_write_that_did_not_end_is_nothing_to_rely_on():
    world, store = with_segments()
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots)
    world.segments.leaving(slots)
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, 0)
    store.announce()  # too late: the segment is not known any more
    assert tokens_by_tier(world) == (0, 0)


def test_what_failed_to_be_written_is_not_in_the_store():
    world, store = with_segments()
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots)
    store.storage.fault = "set"
    store.announce()
    world.segments.leaving(slots)
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, 0)


def test_what_is_in_the_store_leaves_before_what_is_nowhere_else():
    world, store = with_segments()
    left_device(world, store, ["a"])
    store.storage.fault = "set"
    left_device(world, store, ["b"])
    for _ in range(3):  # "a" is used more, but costs only a fetch
        world.segments.register(["a"], world.take(SHORT))
        world.segments.leaving(world.segments._slots.all()[0].slots)
    world.segments.make_room(1)
    assert tokens_by_tier(world) == (SHORT, SHORT)
    assert world.index.find("b").has(Form.WHOLE)
    world.segments.make_room(1)
    assert tokens_by_tier(world) == (0, SHORT)


def test_a_store_slower_than_a_prefill_is_nothing_to_remember():
    world, store = with_segments()
    ranks = world.segments._ranks
    ranks.prices = lambda stored: replace(PRICES, store_s_per_byte=1.0)
    left_device(world, store, ["a"])
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, 0)


@pytest.mark.parametrize("split", [False, True])
def test_what_the_store_alone_has_comes_back_by_a_fetch(split):
    world, store = with_segments()
    world.segments.kept = KEPT if split else 0
    slots = world.write_text(["a", "ab"])
    world.segments.register(["a", "ab"], slots)
    if split:
        for name in ("a", "ab"):
            world.split(name)
        world.segments.settle(["a", "ab"])
    store.announce()
    world.segments.leaving(slots)
    world.give(slots)
    world.segments.make_room(10**9)
    assert (world.index.drafts(), world.page_pool.used_bytes) == ([], 0)
    assert tokens_by_tier(world) == (0, 2 * SHORT)
    world.segments.stored.fetch("r", ["a", "ab"], 0)
    store.arrive()
    assert fetched(world.segments, "r")
    assert tokens_by_tier(world) == (2 * SHORT, 0)
    assert world.index.find("a").has(Form.DRAFT) is split
    for name in ("a", "ab"):
        assert torch.equal(restored_scores(world, name), world.truth_scores(name))
    world.segments.check()


def test_what_the_store_has_no_more_is_forgotten():
    world, store = with_segments()
    left_device(world, store, ["a", "ab"])
    world.segments.make_room(10**9)
    store.lose("a")
    world.segments.stored.fetch("r", ["a", "ab"], 0)
    store.arrive()
    assert fetched(world.segments, "r")
    assert tokens_by_tier(world) == (0, SHORT), "the second was not asked for"
    world.segments.check()


def test_a_text_computed_again_is_on_the_device_and_written_no_more():
    world, store = with_segments()
    left_device(world, store, ["a"])
    world.segments.make_room(10**9)
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots)
    assert store.waiting == 0
    assert Tier.DEVICE in tiers_of(world.index.get("a"))
    world.segments.leaving(slots)
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, SHORT), "the store has it all the while"


def test_the_segments_known_in_the_store_are_bounded(monkeypatch):
    monkeypatch.setattr("vericache_sglang.prefix_cache.segment_tiers.MOST_STORED", 3)
    world, store = with_segments()
    for name in "abcde":
        left_device(world, store, [name])
    world.segments.make_room(10**9)
    assert tokens_by_tier(world) == (0, 3 * SHORT)
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
    world, _ = with_segments()
    world.segments.kept = KEPT
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots)
    world.segments.add_draft("a", world.draft("a"))
    world.segments.use("r", ["a"])  # before its complement is there
    world.segments.leaving(slots)
    world.segments.make_room(10**9)
    assert world.segments.used_slots == KEPT
    world.segments.release("r")
    world.segments.evict_drafts(99)
    world.segments.make_room(10**9)
    assert (world.index.drafts(), world.page_pool.used_bytes) == ([], 0)


# -- draft KV that was made offline -------------------------------------------------


def parts_of(world, name, kept):
    """Return a segment's two parts, of which ``kept`` [L, H, n] tokens are drafted."""
    world.kept = lambda name: kept
    rows = world.of(name, kept), world.of(name, world.away(name))
    both = [bits.view(torch.float32) for bits in rows]
    draft, residual = ({"keys": kv[:, 0], "values": kv[:, 1]} for kv in both)
    return {"draft": {**draft, "kept": kept}, "residual": residual}


def first_tokens(count):
    return torch.arange(count, dtype=torch.int32).repeat(2, 2, 1)


def taken_in(world, store, name):
    world.segments.stored.fetch("r", [name], 0)
    store.arrive()
    return fetched(world.segments, "r") and world.segments.stored.pop("r")[0]


def test_better_parts_are_taken_as_they_are_and_not_written_again():
    world, store = with_segments(better=["better"])
    world.segments.kept, other = KEPT, SegmentWorld()
    first = first_tokens(KEPT)
    assert store.put("a", parts_of(other, "a", first), "better")
    assert taken_in(world, store, "a")
    assert torch.equal(world.copies.images_of("a", Form.DRAFT)["kept"].read(), first)
    assert not world.segments.stored.wants("a", split=True)
    target = world.take(SHORT)
    assert world.segments.restore(["a"], 0, target) == []
    assert torch.equal(world.at(target), other.truth("a"))


@pytest.mark.parametrize("why", ["unknown compressor", "another count"])
def test_parts_that_do_not_fit_are_joined(why):
    world, store = with_segments()
    world.segments.kept, other = KEPT, SegmentWorld()
    by, count = ("x", KEPT) if why == "unknown compressor" else (COMPRESSOR, KEPT + 1)
    assert store.put("a", parts_of(other, "a", first_tokens(count)), by)
    assert taken_in(world, store, "a")
    assert world.index.find("a").has(Form.WHOLE)
    assert world.index.residual_bytes == 0
    target = world.take(SHORT)
    assert world.segments.restore(["a"], 0, target) == []
    assert torch.equal(world.at(target), other.truth("a"))
