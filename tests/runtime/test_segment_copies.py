"""Every form of a cached segment gives its bits back, or says that it cannot."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_world import KEPT, SHORT, SegmentWorld

from vericache_sglang.compression.budget import Budget
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.prefix_cache.segment import Form

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["whole", "split", "split, all on the host"]


def brought(world, name, form):
    """Bring a segment off the tree in one of its forms."""
    if form == "whole":
        slots = world.write_text([name])
        assert world.copies.save_whole(name, slots)
        world.give(slots)
        return
    world.split(name)
    if form != "split":
        world.give(world.copies.save_draft(name))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_comes_back_bit_by_bit(dtype, form):
    @settings(deadline=None, max_examples=15)
    @given(st.text("ab", min_size=1, max_size=6), st.integers(0, SHORT - 1))
    def round_trips(name, skip):
        world = SegmentWorld(dtype=dtype)
        assert not world.index.find(name).restorable
        brought(world, name, form)
        assert world.index.find(name).restorable
        target = world.take(SHORT - skip).flip(0)  # any order of slots
        world.copies.restore(name, skip, target)
        assert torch.equal(world.at(target), world.truth(name)[:, :, skip:])

    round_trips()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_these_tests_hold_nans_that_arithmetic_would_change(dtype):
    world = SegmentWorld(dtype=dtype)
    found = world.truth("a").view(dtype)
    assert found[:, :, 0, :, 0].isnan().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_form_is_not_brought_back(form):
    world = SegmentWorld()
    brought(world, "a", form)
    world.damage("a")
    with pytest.raises(TransferError, match=r"checksum differs|is damaged"):
        world.copies.restore("a", 0, world.take(SHORT))


def test_a_damaged_draft_part_on_the_host_is_not_brought_back():
    world = SegmentWorld()
    brought(world, "a", "split, all on the host")
    world.copies.images_of("a", Form.DRAFT)["values"].raw(0)[0][0] ^= 1
    with pytest.raises(TransferError, match="draft KV of segment a is damaged"):
        world.copies.restore("a", 0, world.take(SHORT))


def test_damage_is_warned_of_once_and_an_image_in_use_goes_with_its_last_user(caplog):
    world = SegmentWorld()
    brought(world, "a", "whole")
    with world.segments.kept_back(["a"]):
        with world.segments.kept_back(["a"]):
            world.damage("a")
            found = [world.copies.images_of("a", Form.WHOLE) for _ in range(3)]
            assert found == [None, None, None]
            assert not world.index.find("a").restorable
        assert world.page_pool.used_bytes > 0, "a copy may still read it"
    assert world.page_pool.used_bytes == 0
    assert [record.message for record in caplog.records] == [
        "VeriCache: segment a was damaged in host memory"
    ]
    brought(world, "a", "whole")
    assert world.index.find("a").restorable


def test_what_a_draft_part_lacks_is_saved_for_it():
    world = SegmentWorld()
    slots = world.write_text(["a"])
    part = world.draft("a")
    world.index.add_draft("a", part)
    assert not world.index.find("a").restorable
    assert world.copies.save_rest("a", part, slots)
    rest = world.segments.residual("a")
    assert torch.equal(rest.kept, world.kept("a"))
    both = torch.stack([rest.keys.view(world.bits), rest.values.view(world.bits)], 1)
    assert torch.equal(both, world.of("a", world.away("a")))
    world.give(slots)
    world.copies.restore("a", 0, target := world.take(SHORT))
    assert torch.equal(world.at(target), world.truth("a"))


def test_parts_that_were_stored_are_taken_in():
    world = SegmentWorld()
    world.split("a")
    draft, rest = world.copies.read_parts("a")
    other = SegmentWorld()
    assert other.copies.take_split("a", draft, rest, SHORT)
    assert other.index.find("a").has(Form.DRAFT)
    target = other.take(SHORT)
    other.copies.restore("a", 0, target)
    assert torch.equal(other.at(target), world.truth("a"))


def test_what_is_read_does_not_change_with_what_it_was_read_from():
    world = SegmentWorld()
    world.split("a")
    draft, rest = world.copies.read_parts("a")
    before = [each.clone() for each in (draft["keys"], draft["kept"], rest["keys"])]
    world.put(torch.arange(96), torch.zeros(2, 2, 96, 2, 4))
    world.damage("a")
    world.segments.draft("a").kept.zero_()
    after = (draft["keys"], draft["kept"], rest["keys"])
    for was, now in zip(before, after, strict=True):
        bits = torch.int32
        assert torch.equal(was.view(bits), now.view(bits))


@pytest.mark.parametrize("room", [100, 700])
def test_without_room_for_both_parts_neither_is_taken_in(room):
    world = SegmentWorld()
    world.split("a")
    parts = world.copies.read_parts("a")
    other = SegmentWorld(host=room)
    assert not other.copies.take_split("a", *parts, SHORT)
    assert other.page_pool.used_bytes == 0
    assert not other.index.find("a").restorable
    assert other.segments.residual("a") is None


def test_without_room_nothing_is_saved_and_nothing_lost():
    world = SegmentWorld(host=600)
    slots = world.write_text(["a"])
    part = world.draft("a")
    world.index.add_draft("a", part)
    hog = world.page_pool.take(500)
    assert not world.copies.save_whole("a", slots)
    assert not world.copies.save_rest("a", part, slots)
    assert world.copies.save_draft("a") is None
    assert world.segments.draft("a") is part
    assert world.segments.residual("a") is None
    assert world.page_pool.used_bytes == hog.nbytes


def test_a_residual_that_is_still_being_filled_is_waited_for():
    """On CUDA it is sealed once the copy has arrived; one that never does is corrupt.

    So that ranks whose copies take longer match as much as the others.
    """
    world = SegmentWorld()
    world.index.add_draft("a", world.draft("a"))
    opened = world.copies.open_residual("a", Budget(SHORT, KEPT, 0, 0))
    assert world.copies.read_parts("a") is None
    target = world.take(SHORT)
    with pytest.raises(TransferError):
        world.copies.restore("a", 0, target)
    thread = ThreadPoolExecutor(1)
    opened.filling = thread.submit(lambda: time.sleep(0.1) or world.fill("a", opened))
    assert world.index.find("a").restorable
    world.copies.restore("a", 0, target)
    assert torch.equal(world.at(target), world.truth("a"))
    assert world.copies.read_parts("a") is not None


def test_what_is_kept_back_stays_where_it_is():
    world = SegmentWorld()
    world.split("a")
    brought(world, "b", "whole")
    brought(world, "c", "split, all on the host")
    before = world.page_pool.used_bytes, world.segments.evictable_bytes
    with world.segments.kept_back(["a", "b", "c", "unknown"]):
        assert world.segments.evictable_bytes == 0
        assert world.segments.idle_slots == 0
        world.copies.drop_host("a")
        assert world.segments.residual("a") is not None
        for name in "bc":
            with pytest.raises(InvariantError, match="is not idle"):
                world.copies.drop_host(name)
    assert (world.page_pool.used_bytes, world.segments.evictable_bytes) == before
    assert world.segments.used_slots == 0
    assert world.index.users() == []


def test_what_is_kept_back_is_released_when_its_user_fails():
    world = SegmentWorld()
    world.split("a")
    with pytest.raises(TransferError), world.segments.kept_back(["a"]):
        raise TransferError("the link broke")
    assert world.segments.idle_slots == KEPT
    assert world.index.users() == []


def test_a_held_residual_outlives_what_the_host_forgets():
    world = SegmentWorld()
    world.split("a")
    world.segments.refer("r", ["a"])
    world.copies.drop_host("a")
    assert world.segments.residual("a") is not None
    world.index.release("r")
    world.copies.drop_host("a")
    assert world.page_pool.used_bytes == 0


def test_a_cleared_host_holds_nothing():
    world = SegmentWorld()
    for name, form in zip("abc", FORMS, strict=True):
        brought(world, name, form)
    world.index.clear()
    assert world.page_pool.used_bytes == 0
    assert not any(world.index.find(name).restorable for name in "abc")


# -- scores of tokens -------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_scores_come_back_with_their_tokens(form):
    world = SegmentWorld()
    brought(world, "a", form)
    target = world.take(SHORT - 2).flip(0)
    world.copies.restore("a", 2, target)
    found = torch.stack(world.scores.noted(target))
    assert torch.equal(found, world.truth_scores("a")[:, :, 2:])


@pytest.mark.parametrize("form", FORMS)
def test_without_scores_restored_tokens_are_as_nobody_scored_them(form):
    """Not as the tokens that had their slots before."""
    world = SegmentWorld()
    world.copies.scores = None
    brought(world, "a", form)
    if "SCORES" in world.forms("a"):
        world.index.drop_image("a", Form.SCORES)
    world.copies.scores = world.scores
    target = world.take(SHORT)
    world.scores.table[:, :, target] = 77.0
    world.copies.restore("a", 0, target)
    assert torch.stack(world.scores.noted(target)).isnan().all()


def test_damaged_scores_are_no_scores_and_cost_no_kv():
    world = SegmentWorld()
    world.split("a")
    world.copies.images_of("a", Form.SCORES)["noted"].raw(0)[0][0] ^= 1
    target = world.take(SHORT)
    world.copies.restore("a", 0, target)
    assert torch.equal(world.at(target), world.truth("a"))
    assert torch.stack(world.scores.noted(target)).isnan().all()


def test_where_nobody_scores_nothing_is_kept_or_noted():
    world = SegmentWorld()
    world.copies.scores = None
    slots = world.write_text(["a"])
    world.index.add_draft("a", part := world.draft("a"))
    assert world.copies.save_rest("a", part, slots)
    world.copies.restore("a", 0, world.take(SHORT))
    assert world.forms("a") == {"RESIDUAL"}


def test_scores_go_with_their_residual():
    world = SegmentWorld()
    world.split("a")
    world.segments.refer("r", ["a"])
    world.copies.drop_host("a")
    assert world.forms("a") == {"RESIDUAL", "SCORES"}
    world.index.release("r")
    with world.segments.kept_back(["a"]):
        world.copies.drop_host("a")
        assert world.forms("a") == {"RESIDUAL", "SCORES"}
    world.copies.drop_host("a")
    assert world.page_pool.used_bytes == 0


def test_scores_are_stored_with_a_draft_part_and_taken_in():
    world = SegmentWorld()
    slots = world.write_text(["a"])
    world.index.add_draft("a", part := world.draft("a"))
    assert world.copies.save_rest("a", part, slots)
    draft, rest = world.copies.read_parts("a")
    other = SegmentWorld()
    assert other.copies.take_split("a", draft, rest, SHORT)
    target = other.take(SHORT)
    other.copies.restore("a", 0, target)
    found = torch.stack(other.scores.noted(target))
    assert torch.equal(found, world.truth_scores("a"))
