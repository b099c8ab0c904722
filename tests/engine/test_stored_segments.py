"""Segments in a store: written once, fetched in time or not at all."""

import pytest
import torch
from segment_world import (
    IDENTITY,
    KEPT,
    SHORT,
    FakeStore,
    shorten_segments,
    with_segments,
)

from vericache_sglang.engine import stored_segments
from vericache_sglang.engine.stored_segments import StoredSegments
from vericache_sglang.store.keys import root_name
from vericache_sglang.store.payload import About

MODEL, COMPRESSOR = IDENTITY
SPACE = (None, "salt")


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch)


class Clock:
    """``time`` as ``stored_segments`` sees it."""

    now = 100.0

    def monotonic(self):
        return self.now


def opened(refuse=()):
    """Return stored segments, their store, and what was taken in, in order."""
    store, taken = FakeStore(COMPRESSOR), []

    def keep(name, parent, found):
        taken.append((name, parent, sorted(found)))
        return name not in refuse

    return StoredSegments(store, COMPRESSOR, keep), store, taken


def written(store, names):
    for name in names:
        store.put_later(name, {"whole": {}}, About((1,), "p", SPACE))


def test_a_segment_is_written_once_with_what_it_stands_for():
    stored, store, _ = opened()
    tokens = list(range(20))
    assert not stored.wants("a")
    stored.describe(["a", "b"], SPACE, tokens)
    assert stored.wants("a")
    stored.write_whole("a", {"keys": torch.ones(1)})
    assert not stored.wants("a")
    about = store.objects["a"]["whole"].label.about
    assert about == About(tuple(range(SHORT)), root_name(MODEL, SPACE), SPACE)
    stored.write_split("b", {"kept": torch.ones(1)}, {"keys": torch.ones(1)})
    for part in ("draft", "rest"):
        about = store.objects["b"][part].label.about
        assert about == About(tuple(range(SHORT, 16)), "a", SPACE, COMPRESSOR)


def test_a_refused_write_may_be_tried_again():
    stored, store, _ = opened()
    stored.describe(["a"], SPACE, range(8))
    store.full = True
    stored.write_whole("a", {})
    assert stored.wants("a")
    store.full = False
    stored.write_whole("a", {})
    assert not stored.wants("a")


def test_what_comes_is_taken_in_in_order_up_to_the_first_that_is_missing():
    stored, store, taken = opened()
    written(store, "abd")
    stored.fetch("r", ["a", "b", "c", "d"], 0)
    assert not stored.fetched("r")
    store.arrive()
    assert stored.fetched("r")
    assert taken == [("a", None, ["whole"]), ("b", "a", ["whole"])]
    assert stored.pop("r") == (16, 0)
    assert stored.pop("r") == (0, None)


def test_a_fetch_begins_with_the_segment_the_device_s_part_ends_in():
    stored, store, taken = opened()
    written(store, "abc")
    stored.fetch("r", ["a", "b", "c"], 2 * SHORT - 3)
    store.arrive()
    assert stored.fetched("r")
    assert [(name, parent) for name, parent, _ in taken] == [("b", "a"), ("c", "b")]
    assert stored.pop("r") == (16, 8)


def test_without_room_the_rest_is_not_taken_in():
    stored, store, taken = opened(refuse=["b"])
    written(store, "abc")
    stored.fetch("r", ["a", "b", "c"], 0)
    store.arrive()
    assert stored.fetched("r")
    assert [name for name, *_ in taken] == ["a", "b"]
    assert stored.pop("r") == (8, 0)


def test_what_was_fetched_is_not_written_again():
    stored, store, _ = opened()
    written(store, "a")
    stored.describe(["a"], SPACE, range(8))
    stored.fetch("r", ["a"], 0)
    store.arrive()
    assert stored.fetched("r")
    assert not stored.wants("a")


def test_nobody_waits_past_the_deadline(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stored_segments, "time", clock)
    stored, store, taken = opened()
    written(store, "a")
    stored.fetch("r", ["a"], 0)
    clock.now += stored_segments.LONGEST_S - 0.1
    assert not stored.fetched("r")
    clock.now += 0.2
    assert stored.fetched("r")
    assert taken == []
    assert stored.pop("r") == (0, None)
    store.arrive()  # too late: nobody is there to take it in
    assert stored.fetched("r")
    assert taken == []


def test_nothing_to_fetch_is_nothing_to_wait_for():
    stored, store, _ = opened()
    assert stored.fetched("r")
    stored.fetch("r", ["a"], SHORT)
    assert store.reads == []
    assert stored.fetched("r")


def test_a_request_is_fetched_for_once():
    stored, store, _ = opened()
    stored.fetch("r", ["a"], 0)
    stored.fetch("r", ["a"], 0)
    stored.fetch("s", ["a"], 0)
    assert len(store.reads) == 2


def test_a_read_that_failed_costs_a_prefill_and_nothing_else():
    stored, store, taken = opened()
    written(store, "a")
    stored.fetch("r", ["a"], 0)
    store.reads[0][2].set_exception(OSError("the disk is gone"))
    assert stored.fetched("r")
    assert taken == []
    assert stored.pop("r") == (0, None)


def test_a_read_that_was_cancelled_costs_a_prefill_and_nothing_else():
    stored, store, _ = opened()
    stored.fetch("r", ["a"], 0)
    store.reads[0][2].cancel()
    assert stored.fetched("r")
    assert stored.pop("r") == (0, None)


def test_the_store_is_closed_and_its_counters_are_told():
    stored, store, _ = opened()
    stored.close()
    assert store.closed
    report = stored.report()
    assert (report["cache_store_hits"], report["cache_store_misses"]) == (3, 2)
    assert report["cache_store_read_bytes"] == 7


# -- with segments below it -------------------------------------------------------


def test_a_segment_of_the_tree_is_stored_and_fetched_by_another_server():
    world, store = with_segments()
    slots = world.write_text(["a", "ab"])
    world.segments.register(["a", "ab"], slots, SPACE, range(16))
    assert sorted(store.objects) == ["a", "ab"]
    other, empty = with_segments()
    empty.objects = store.objects
    other.segments.stored.fetch("r", ["a", "ab", "abc"], 0)
    empty.arrive()
    assert other.segments.stored.fetched("r")
    assert other.segments.reach(["a", "ab", "abc"], 0) == 16
    target = other.take(16)
    assert other.segments.restore(["a", "ab"], 0, target) is None
    for at, name in enumerate(["a", "ab"]):
        own = target[at * SHORT : (at + 1) * SHORT]
        assert torch.equal(other.at(own), world.truth(name))


def test_a_split_segment_is_stored_in_two_parts():
    world, store = with_segments()
    world.segments.kept = KEPT
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots, SPACE, range(8))
    assert store.objects == {}
    world.split("a")
    world.segments.settle(["a"])
    assert sorted(store.objects["a"]) == ["draft", "rest"]
    other, same = with_segments()
    same.objects = store.objects
    assert other.segments.take_in("a", None, store.objects["a"])
    target = other.take(SHORT)
    assert other.segments.restore(["a"], 0, target) is None
    assert torch.equal(other.at(target), world.truth("a"))


def test_a_segment_without_the_one_before_it_is_not_taken_in():
    world, store = with_segments()
    written(store, ["ab"])
    assert not world.segments.take_in("ab", "a", store.objects["ab"])
    assert world.arena.used_bytes == 0


def test_parts_of_another_compressor_are_taken_in_as_a_whole():
    world, store = with_segments()
    world.split("a")
    draft, rest = world.copies.read_parts("a")
    about = About((1,), "p", SPACE, "keeps other tokens")
    store.put_later("a", {"draft": draft, "rest": rest}, about)
    other, _ = with_segments()
    assert other.segments.take_in("a", None, store.objects["a"])
    assert other.copies.has_whole("a")
    assert "a" not in other.complements
    target = other.take(SHORT)
    assert other.segments.restore(["a"], 0, target) is None
    assert torch.equal(other.at(target), world.truth("a"))


def test_without_room_on_the_host_a_stored_segment_stays_in_the_store():
    world, store = with_segments(host=256)
    whole = {name: torch.zeros(2, 8, 2, 4) for name in ("keys", "values")}
    store.put_later("a", {"whole": whole}, About((1,), "p", SPACE))
    assert not world.segments.take_in("a", None, store.objects["a"])
    assert world.arena.used_bytes == 0
    assert world.segments.reach(["a"], 0) == 0
    world.segments.check()


def test_what_is_on_the_device_only_is_written_when_the_server_ends():
    world, store = with_segments()
    world.segments.kept = KEPT
    slots = world.write_text(["a"])
    world.segments.register(["a"], slots, SPACE, range(8))
    world.segments.close()
    assert sorted(store.objects) == ["a"]
    assert store.closed


def test_a_segment_whose_complement_somebody_holds_is_not_taken_in_twice():
    """A parked request refers to it; its draft part had to leave the host."""
    world, store = with_segments()
    world.split("a")
    parts = world.copies.read_parts("a")
    about = About((1,), "p", SPACE, COMPRESSOR)
    store.put_later("a", dict(zip(("draft", "rest"), parts, strict=True)), about)
    world.segments.refer("parked", ["a"])
    world.give(world.copies.shelf.remove("a").slots)
    used = world.arena.used_bytes
    assert not world.segments.take_in("a", None, store.objects["a"])
    assert world.arena.used_bytes == used
    world.segments.release("parked")
    assert world.segments.take_in("a", None, store.objects["a"])
    assert world.segments.reach(["a"], 0) == SHORT
