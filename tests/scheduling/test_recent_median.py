"""What compressing is taken to cost: exceptions do not count, and nothing lasts."""

from statistics import median_low

from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.scheduling.recent_median import RECENT, SILENT, RecentMedian

SAMPLES = st.lists(st.floats(0, 10), max_size=3 * RECENT)


@given(SAMPLES)
def test_it_is_the_median_of_the_last_samples_and_the_start(samples):
    made = RecentMedian(1.0, most=5.0)
    for sample in samples:
        made.observe(sample)
    kept = [min(sample, 5.0) for sample in samples[-RECENT:]]
    expected = kept if len(kept) == RECENT else [1.0, *kept]
    assert made.value == median_low(expected)


def test_two_exceptions_in_a_row_change_nothing_after_the_first_usual_sample():
    made = RecentMedian(1e-6, most=1.0)
    for sample, value in ((0.5, 1e-6), (2e-6, 2e-6), (0.5, 2e-6), (2e-6, 2e-6)):
        made.observe(sample)
        assert made.value == value


@given(SAMPLES)
def test_a_value_that_nothing_confirms_returns_to_the_start(samples):
    made = RecentMedian(1.0, most=5.0)
    for sample in samples:
        made.observe(sample)
    for _ in range(RECENT * SILENT):
        made.pass_over()
    assert made.value == 1.0


def test_a_value_that_is_confirmed_stays():
    made = RecentMedian(1.0, most=5.0)
    for _ in range(20 * SILENT):
        made.pass_over()
        made.observe(3.0)
    assert made.value == 3.0
