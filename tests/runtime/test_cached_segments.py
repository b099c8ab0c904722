"""Cached segments against a dictionary: no byte and no slot is lost, none is wrong."""

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from segment_machine import SegmentMachine
from segment_world import KEPT, SHORT, SegmentWorld, shorten_segments

from vericache_sglang.compression.budget import Budget
from vericache_sglang.errors import InvariantError
from vericache_sglang.prefix_cache.segment import Form, Use

SPLIT = Budget(SHORT, KEPT, 0, 0)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch)


def test_any_history_agrees_with_a_dictionary():
    """Histories of up to a hundred steps."""
    run_state_machine_as_test(
        SegmentMachine,
        settings=settings(stateful_step_count=100),
    )


# -- one by one -------------------------------------------------------------------


def registered(world, names):
    """Compute a text and have the tree own it; return its slots."""
    slots = world.write_text(names)
    world.segments.register(names, slots)
    return slots


def test_a_text_is_reached_as_far_as_every_segment_can_be_restored():
    world = SegmentWorld()
    names = ["a", "ab", "abc", "abcd"]
    slots = registered(world, names)
    assert world.segments.reach(names, 0) == 0
    for at in (0, 1, 3):
        world.segments.leaving(slots[at * SHORT : (at + 1) * SHORT])
    assert world.segments.reach(names, 0) == 2 * SHORT
    assert world.segments.reach(names, SHORT + 3) == 2 * SHORT
    assert world.segments.reach(names, 2 * SHORT) == 2 * SHORT
    assert world.segments.reach(names, 3 * SHORT) == 4 * SHORT
    assert world.segments.reach(names, 4 * SHORT + 5) == 4 * SHORT + 5
    assert world.segments.reach([], 0) == 0


def test_a_text_comes_back_from_the_middle_of_a_segment():
    world = SegmentWorld()
    names = ["a", "ab"]
    world.segments.leaving(slots := registered(world, names))
    world.give(slots)
    target = world.take(2 * SHORT - 5)
    assert world.segments.restore(names, 5, target) == []
    whole = torch.cat([world.truth(name) for name in names], dim=2)
    assert torch.equal(world.at(target), whole[:, :, 5:])
    assert world.segments.counters.match_host_tokens == 2 * SHORT - 5


def test_a_damaged_segment_is_named_and_not_trusted():
    world = SegmentWorld()
    names = ["a", "ab", "abc"]
    world.segments.leaving(registered(world, names))
    world.damage("ab")
    assert world.segments.restore(names, 0, torch.arange(24)) == ["ab"]
    assert world.segments.reach(names, 0) == SHORT
    assert world.segments.counters.checksum_failures == 1
    world.segments.forget("ab")
    world.segments.check()
    assert not world.index.find("ab").restorable


def test_the_least_used_leave_the_host_first_and_no_segment_before_its_followers():
    world = SegmentWorld()
    for names in (["a", "ab"], ["c", "cd"]):
        world.segments.leaving(slots := registered(world, names))
        world.give(slots)
    for _ in range(5):
        registered(world, ["c", "cd"])  # used again
    left = []
    for _ in range(4):
        before = {
            n for n in ("a", "ab", "c", "cd") if world.index.find(n).has(Form.WHOLE)
        }
        world.segments.make_room(1)
        after = {n for n in before if world.forms(n)}
        left += sorted(before - after)
    assert left == ["ab", "a", "cd", "c"]
    assert world.segments.counters.evicted_host_tokens == 4 * SHORT


def test_a_kept_back_segment_does_not_give_way():
    world = SegmentWorld()
    world.segments.leaving(registered(world, ["a"]))
    with world.segments.kept_back(["a"]):
        world.segments.make_room(10**9)
        assert world.index.find("a").restorable
    world.segments.make_room(10**9)
    assert world.page_pool.used_bytes == 0


def test_without_room_for_all_residuals_none_is_opened():
    world = SegmentWorld(host=1500)
    assert world.segments.open_residuals(["a", "b", "c"], SPLIT) is None
    assert (world.index.residual_bytes, world.page_pool.used_bytes) == (0, 0)
    assert len(world.segments.open_residuals(["a", "b"], SPLIT)) == 2


def test_older_segments_give_way_to_new_residuals():
    world = SegmentWorld(host=2400)
    world.segments.leaving(registered(world, ["a", "ab"]))
    assert world.index.find("ab").restorable
    assert world.segments.open_residuals(["c", "cd", "cde"], SPLIT) is not None
    assert not world.index.find("ab").restorable
    world.segments.check()


def test_a_segment_without_room_on_the_host_is_refused_and_forgotten():
    world = SegmentWorld(host=512)
    slots = registered(world, ["a"])
    world.segments.leaving(slots)
    report = world.segments.report()
    assert report["cache_refused_segments"] == 1
    assert (report["cache_segments"], report["cache_device_tokens"]) == (0, 0)
    assert report["cache_evicted_device_tokens"] == SHORT
    world.segments.check()


def test_a_segment_that_nothing_leads_to_takes_no_room():
    """Its parent found no room; it would, since its draft part holds some of it."""
    world = SegmentWorld(host=1000)
    slots = registered(world, ["a", "ab"])
    world.segments.add_draft("ab", world.draft("ab"))
    world.segments.use("r", ["ab"])
    world.segments.leaving(slots)
    assert world.segments.reach(["a", "ab"], 0) == 0
    world.segments.release("r")
    world.segments.make_room(10**9)
    assert world.page_pool.used_bytes == 0


def test_a_segment_that_leaves_the_device_does_not_push_out_what_it_follows():
    """Its residual KV would be where no request for room finds it."""
    world = SegmentWorld(host=1800)  # room for one segment and a half
    slots = registered(world, ["a", "ab"])
    world.segments.add_draft("ab", world.draft("ab"))
    world.segments.leaving(slots)
    assert world.index.find("a").restorable
    assert world.segments.report()["cache_host_tokens"] >= SHORT
    world.segments.evict_drafts(99)
    world.segments.make_room(10**9)
    assert world.page_pool.used_bytes == 0
    world.segments.check()


def test_draft_parts_leave_the_device_but_not_those_somebody_lists():
    world = SegmentWorld()
    for name in "abc":
        registered(world, [name])
        world.split(name)
        world.segments.settle([name])
    world.segments.use("r", ["b"])
    free = len(world.free)
    assert world.segments.evict_drafts(100) == 2 * KEPT
    assert len(world.free) == free + 2 * KEPT
    assert world.segments.draft("b") is not None
    assert world.index.find("a").has(Form.DRAFT)
    world.segments.release("r")
    assert world.segments.evict_drafts(1) == KEPT
    assert world.segments.report()["cache_draft_slots"] == 0
    world.segments.check()


def test_what_the_tree_keeps_is_not_kept_twice():
    """It is saved when it leaves; one saved before would be lost sight of."""
    world = SegmentWorld()
    slots = registered(world, ["a"])
    world.segments.keep(["a"], 0, slots)
    world.segments.leaving(slots)
    assert world.index.find("a").restorable
    world.segments.make_room(10**9)
    assert world.page_pool.used_bytes == 0


def test_what_a_request_said_does_not_push_out_what_it_follows():
    world = SegmentWorld(host=1300)  # room for one segment
    slots = registered(world, ["a"])
    world.segments.leaving(slots)
    said = world.write_text(["ab"])
    world.segments.keep(["a", "ab"], 1, said)
    world.segments.check()
    assert world.segments.reach(["a", "ab"], 0) == SHORT
    world.segments.make_room(10**9)
    assert world.page_pool.used_bytes == 0


def test_what_a_user_of_a_draft_part_needs_is_no_room():
    """The complement of a segment that a request lists is held by nobody, but stays."""
    world = SegmentWorld()
    for name in "ab":
        registered(world, [name])
        world.split(name)
        world.segments.settle([name])
    every = world.segments.evictable_bytes
    assert every == world.page_pool.used_bytes
    world.segments.use("r", ["b"])
    assert world.segments.evictable_bytes == every // 2
    world.segments.make_room(10**9)
    assert world.page_pool.used_bytes == every - every // 2
    assert world.segments.evictable_bytes == 0
    world.segments.release("r")
    assert world.segments.evictable_bytes == world.page_pool.used_bytes > 0


@pytest.mark.parametrize("how", ["use", "refer"])
def test_kv_that_a_segment_does_not_have_is_used_by_none(how):
    world = SegmentWorld()
    world.split("a")
    with pytest.raises(InvariantError, match="KV that segments do not have"):
        getattr(world.segments, how)("r", ["a", "b"])
    assert (world.segments.used_slots, world.index.users()) == (0, [])
    world.segments.check()


def test_a_wrong_count_is_noticed():
    world = SegmentWorld()
    world.split("a")
    world.index.find("a").users["r"] = Use.RESIDUAL
    with pytest.raises(InvariantError, match="other users"):
        world.segments.check()
