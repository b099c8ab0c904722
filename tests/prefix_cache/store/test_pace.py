"""The pace of a store: decaying means, by hand."""

from math import inf

import pytest

from vericache_sglang.prefix_cache.store.pace import DECAY, Pace


def test_nothing_seen_is_no_store():
    assert Pace().s_per_byte == inf


def test_writes_stand_in_for_reads_until_there_is_one():
    pace = Pace()
    pace.note("write", 100, 2.0)
    assert pace.s_per_byte == 0.02
    pace.note("read", 50, 0.5)
    assert pace.s_per_byte == 0.01
    pace.note("write", 100, 50.0)
    assert pace.s_per_byte == 0.01


def test_what_was_seen_before_counts_less_and_less():
    pace = Pace()
    seen = [(100, 1.0), (300, 1.0), (50, 4.0), (100, 0.1)]
    for nbytes, seconds in seen:
        pace.note("read", nbytes, seconds)
    weights = [DECAY**3, DECAY**2, DECAY, 1.0]
    nbytes = sum(w * each for w, (each, _) in zip(weights, seen, strict=True))
    seconds = sum(w * each for w, (_, each) in zip(weights, seen, strict=True))
    assert pace.s_per_byte == pytest.approx(seconds / nbytes)


def test_a_store_that_became_slow_is_known_to_be_slow():
    pace = Pace()
    for _ in range(1000):
        pace.note("read", 1000, 1e-6)
    for _ in range(50):
        pace.note("read", 1000, 1.0)
    assert pace.s_per_byte == pytest.approx(1e-3, rel=0.01)
