"""Which slots hold which segments, against a dictionary."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from segment_world import SHORT, shorten_segments

from vericache_sglang.prefix_cache.segment_slots import SegmentSlots

SLOTS = 12 * SHORT


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch)


def named(text):
    """Names of a text's segments; equal for equal beginnings."""
    return [text[: i + 1] for i in range(len(text))]


TEXTS = st.text("pq", min_size=1, max_size=3)
ACTS = st.one_of(
    st.tuples(st.just("enter"), TEXTS, st.integers(0, SHORT - 1)),
    st.tuples(st.just("leave"), st.sets(st.integers(0, SLOTS - 1), max_size=9)),
)


def test_what_loses_one_slot_is_forgotten_whole():
    @given(st.lists(ACTS, max_size=30))
    def histories(acts):
        slots, known = SegmentSlots(SLOTS), {}
        for act, what, *more in acts:
            if act == "enter":
                enter(slots, known, what, more[0])
            else:
                left = slots.leave(torch.tensor(sorted(what), dtype=torch.int32))
                gone = [n for n, (_, own) in known.items() if what & set(own)]
                assert sorted(each.name for each in left) == sorted(gone)
                for each in left:
                    parent, own = known.pop(each.name)
                    assert (each.parent, each.slots.tolist()) == (parent, own)
            assert len(slots) == len(known)
            assert [each.name for each in slots.all()] == list(known)
            for name in ("p", "q", "pp", "pq", "qqq"):
                assert (name in slots) is (name in known)

    histories()


def enter(slots, known, text, tail):
    """Enter a text whose new segments and short tail take slots nobody has."""
    names = named(text)
    taken = {slot for _, own in known.values() for slot in own}
    fresh = [slot for slot in range(SLOTS) if slot not in taken]
    row = []
    for name in names:
        if name in known:
            row += known[name][1]
        else:
            row += [fresh.pop(0) for _ in range(SHORT) if fresh]
    if len(row) < len(names) * SHORT:
        return
    row += fresh[:tail]
    slots.enter(names, torch.tensor(row, dtype=torch.int32))
    for at, name in enumerate(names):
        own = row[at * SHORT : (at + 1) * SHORT]
        known.setdefault(name, (names[at - 1] if at else None, own))


def test_what_is_entered_does_not_follow_the_row_it_came_from():
    slots = SegmentSlots(SLOTS)
    row = torch.arange(SHORT, dtype=torch.int64)
    slots.enter(["p"], row)
    row += 1
    assert slots.all()[0].slots.tolist() == list(range(SHORT))


def test_a_cleared_one_knows_nothing():
    slots = SegmentSlots(SLOTS)
    slots.enter(["p"], torch.arange(SHORT))
    slots.clear()
    assert len(slots) == 0
    assert "p" not in slots
    assert slots.leave(torch.arange(SLOTS)) == []
    slots.enter(["q"], torch.arange(SHORT))
    assert [each.name for each in slots.leave(torch.tensor([3]))] == ["q"]
