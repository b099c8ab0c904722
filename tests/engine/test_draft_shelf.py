"""The shelf of draft parts, against a list kept by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.prefix_cache.draft_segments import DraftSegmentPool
from vericache_sglang.prefix_cache.segment_images import DraftPart

NAMES = "abcde"


def part(slots=3, first=0):
    return DraftPart(
        torch.arange(first, first + slots), torch.zeros(1, 1, slots, dtype=torch.int32)
    )


ACTS = st.tuples(
    st.sampled_from(["add", "take", "give", "remove", "take", "give"]),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(ACTS, max_size=40))
def test_users_slots_and_the_order_of_use_are_counted(acts):
    draft_pool = DraftSegmentPool()
    # Name to (slots, users), last used last: what the shelf should be.
    known = {}
    for act, names in acts:
        name = names[0]
        if act == "add" and name not in known:
            draft_pool.add(name, part(NAMES.index(name) + 1))
            known[name] = [NAMES.index(name) + 1, 0]
        elif act == "take" and all(each in known for each in names):
            assert [len(each.slots) for each in draft_pool.take(names)] == [
                known[each][0] for each in names
            ]
            for each in names:
                known[each] = known.pop(each)
                known[each][1] += 1
        elif act == "give" and all(known.get(each, [0, 0])[1] for each in names):
            draft_pool.give(names)
            for each in names:
                known[each][1] -= 1
        elif act == "remove" and name in known and not known[name][1]:
            assert len(draft_pool.remove(name).slots) == known.pop(name)[0]
        elif act != "give" or len(names) == 1:
            with pytest.raises(InvariantError):
                refused(draft_pool, act, names, part())
        assert draft_pool.used_slots == sum(
            slots for slots, users in known.values() if users
        )
        assert draft_pool.idle_slots == sum(
            slots for slots, users in known.values() if not users
        )
        assert draft_pool.idle() == [
            each for each, (_, users) in known.items() if not users
        ]
        assert len(draft_pool) == len(known)
        for each in NAMES:
            assert (each in draft_pool) is (each in known)
            assert (draft_pool.get(each) is not None) is (each in known)


def refused(draft_pool, act, names, new):
    """Ask for what cannot be."""
    if act == "add":
        draft_pool.add(names[0], new)
    elif act == "remove":
        draft_pool.remove(names[0])
    else:
        {"take": draft_pool.take, "give": draft_pool.give}[act](names)


def test_a_take_of_an_unknown_part_takes_none():
    draft_pool = DraftSegmentPool()
    draft_pool.add("a", part())
    with pytest.raises(InvariantError, match=r"no draft part of segments \['b'\]"):
        draft_pool.take(["a", "b"])
    assert (draft_pool.used_slots, draft_pool.idle_slots) == (0, 3)


def test_a_part_that_somebody_lists_is_not_added():
    listed = part()
    listed.users = 1
    with pytest.raises(InvariantError, match="a second draft part for segment a"):
        DraftSegmentPool().add("a", listed)


def test_a_shelf_in_use_is_not_cleared():
    draft_pool = DraftSegmentPool()
    draft_pool.add("a", part())
    draft_pool.add("b", part())
    draft_pool.take(["a"])
    with pytest.raises(InvariantError, match="3 slots of draft parts are in use"):
        draft_pool.clear()
    assert len(draft_pool) == 2
    draft_pool.give(["a"])
    draft_pool.clear()
    assert (len(draft_pool), draft_pool.idle_slots) == (0, 0)
