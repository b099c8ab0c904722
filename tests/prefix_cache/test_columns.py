"""The arrays of an index: rows that are used again, and what is found wrong."""

import pytest
from forest import HALF_LIFE_S, chain_of, whole

from vericache_sglang.errors import InvariantError
from vericache_sglang.prefix_cache.index import SegmentIndex
from vericache_sglang.prefix_cache.segment import Tier


def test_rows_grow_and_are_used_again():
    index = SegmentIndex(HALF_LIFE_S)
    for turn in range(3):
        names = chain_of(index, [whole(8, Tier.HOST)] * 150, name=f"{turn}-")
        index.check()
        for name in reversed(names):
            index.drop(name)
        index.check()
    assert len(index.columns) == 256


def test_a_row_that_differs_from_its_segment_is_found():
    for spoil in (
        lambda columns: columns.nbytes.__setitem__((0, 0), 9),
        lambda columns: columns.tier.__setitem__((0, 0), 2),
        lambda columns: columns.uses.__setitem__(0, 7.0),
        lambda columns: columns.pinned.__setitem__(0, True),
        lambda columns: columns.parent.__setitem__(1, -1),
    ):
        index = SegmentIndex(HALF_LIFE_S)
        names = chain_of(index, [whole(8, Tier.HOST)] * 2)
        index.check()
        assert index.columns.names[:2] == names
        spoil(index.columns)
        with pytest.raises(InvariantError, match=r"segment s[01] is"):
            index.check()


def test_a_segment_too_far_into_a_prompt_is_refused():
    index = SegmentIndex(HALF_LIFE_S)
    index.add("a", None, whole(8, Tier.HOST, tokens=1 << 27), 0.0)
    with pytest.raises(InvariantError, match="b starts at 134217728"):
        index.add("b", "a", whole(8, Tier.HOST), 0.0)
    index.check()
