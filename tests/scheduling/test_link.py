"""Bandwidth of a link, and the bounded mean under it, by hand computation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.link import LARGE, LinkEstimate

NAN, INF = float("nan"), float("inf")


def test_the_first_sample_replaces_the_start_and_the_next_ones_move_it():
    mean = Ewma(100.0, least=0.0, most=1000.0, weight=0.25)
    values = []
    for sample in (10.0, 20.0, 10.0):
        mean.observe(sample)
        values.append(mean.value)
    assert values == [10.0, 12.5, 11.875]


def test_a_sample_counts_as_often_as_it_is_said_to():
    once, often = (Ewma(0.0, least=0.0, most=9.0, weight=0.25) for _ in range(2))
    for sample, count in ((1.0, 2), (5.0, 3), (2.0, 1)):
        for _ in range(count):
            once.observe(sample)
        often.observe(sample, count)
    assert often.value == pytest.approx(once.value)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_a_mean_never_leaves_its_bounds(samples):
    mean = Ewma(2.0, least=1.0, most=3.0)
    for sample in samples:
        mean.observe(sample)
        assert 1.0 <= mean.value <= 3.0


@pytest.mark.parametrize(
    ("start", "weight"), [(0.5, 0.1), (3.5, 0.1), (NAN, 0.1), (2.0, 0.0), (2.0, 1.5)]
)
def test_an_impossible_mean_is_refused(start, weight):
    with pytest.raises(InvariantError, match="mean starts at"):
        Ewma(start, least=1.0, most=3.0, weight=weight)


def test_seconds_are_bytes_over_the_start_until_something_was_measured():
    link = LinkEstimate(8e9, 4e9)
    assert link.seconds(16_000_000, "in") == 2e-3
    assert link.seconds(16_000_000, "out") == 4e-3
    assert link.seconds(0, "in") == 0.0


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize(("size", "name"), [(LARGE - 1, "small"), (LARGE, "large")])
def test_a_transfer_moves_its_own_class_only(direction, size, name):
    link = LinkEstimate(8e9)
    link.observe(size, size / 2e9, direction)
    moved = f"link_{direction}_{name}_bytes_per_s"
    report = link.report()
    assert report.pop(moved) == pytest.approx(2e9)
    assert list(report.values()) == [8e9] * 3
    assert link.seconds(size, direction) == pytest.approx(size / 2e9)


def test_a_slower_link_is_found_out():
    link = LinkEstimate(8e9)
    for rate in [8e9] * 50 + [2e9] * 50:
        link.observe(LARGE, LARGE / rate, "in")
    # A tenth of every new sample: 0.9^50 of the old 6e9 difference is left.
    assert link.bytes_per_s(LARGE, "in") == pytest.approx(2e9 + 6e9 * 0.9**50)


@pytest.mark.parametrize(
    ("size", "seconds"), [(0, 1.0), (-5, 1.0), (5, 0.0), (5, -1.0), (5, NAN), (5, INF)]
)
def test_nonsense_is_ignored(size, seconds):
    link = LinkEstimate(8e9)
    link.observe(size, seconds, "in")
    assert set(link.report().values()) == {8e9}


def test_what_cannot_be_believed_is_clipped_to_the_bounds():
    link = LinkEstimate(8e9)
    link.observe(LARGE, 1e-12, "in")
    link.observe(LARGE, 1e12, "out")
    assert link.bytes_per_s(LARGE, "in") == 2e12
    assert link.bytes_per_s(LARGE, "out") == 1e6
    with pytest.raises(InvariantError):
        LinkEstimate(1.0)
