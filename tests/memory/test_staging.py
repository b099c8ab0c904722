"""The staging region under random takes and gives, against a set of slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.staging import Span, StagingRegion


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 50))))
def test_no_slot_is_handed_out_twice(steps):
    region, held = StagingRegion(100, 64), []
    for take, slots, which in steps:
        if take:
            span = region.take(slots)
            if span is not None:
                held.append(span)
            else:
                assert all(size < slots for size in region.free_spans())
        elif held:
            region.give(held.pop(which % len(held)))
        taken = [slot for s in held for slot in range(s.start, s.start + s.slots)]
        assert len(set(taken)) == len(taken) == region.used
        assert all(100 <= slot < 164 for slot in taken)
        assert sum(region.free_spans()) == 64 - len(taken)
    for span in held:
        region.give(span)
    assert region.free_spans() == (64,)


def test_first_fit_is_what_the_planner_assumes():
    region = StagingRegion(0, 30)
    first = region.take(10)
    region.take(10)
    region.give(first)
    assert region.free_spans() == (10, 10)
    assert region.take(8) == Span(0, 8)
    assert region.free_spans() == (2, 10)


def test_giving_back_twice_is_an_error():
    region = StagingRegion(0, 10)
    span = region.take(4)
    region.give(span)
    with pytest.raises(InvariantError, match="given back twice"):
        region.give(span)


def test_an_empty_region_stages_nothing():
    assert StagingRegion(7, 0).take(1) is None
