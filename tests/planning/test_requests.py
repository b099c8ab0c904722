"""Request queues: sums and what fits, against counting one by one."""

from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.requests import (
    Requests,
    equal_requests,
    mixed_requests,
)

patterns = st.lists(st.integers(1, 50), min_size=1, max_size=5).map(tuple)


def first(pattern, count):
    return list(islice(cycle(pattern), count))


@given(pattern=patterns, count=st.integers(0, 40))
def test_sum_of_the_first_requests(pattern, count):
    assert Requests(pattern).kv_bytes(count) == sum(first(pattern, count))


@given(
    pattern=patterns,
    room=st.integers(-5, 500),
    skip=st.integers(0, 5),
    concurrency=st.none() | st.integers(1, 20),
)
def test_what_fits_is_what_counting_finds(pattern, room, skip, concurrency):
    count = used = 0
    queue = first(pattern, 1200)[skip:]
    limit = 1100 if concurrency is None else concurrency - skip
    while count < limit and used + queue[count] * 0.5 <= room:
        used += queue[count] * 0.5
        count += 1
    requests = Requests(pattern, concurrency)
    assert requests.fitting(room, 0.5, skip) == count


def test_mixed_requests_are_interleaved():
    mixed = mixed_requests([(10, 1), (2, 3)], kv_bytes_per_token=3)
    assert sorted(mixed.pattern) == [6, 6, 6, 30]
    assert mixed.pattern[0] == 6  # neither length comes first as a block
    assert mixed.pattern[-1] == 6
    assert mixed.mean_kv_bytes == 12


def test_a_mix_of_one_length_is_that_length():
    mixed = mixed_requests([(7, 2), (7, 3)], kv_bytes_per_token=4)
    equal = equal_requests(28)
    for count in range(12):
        assert mixed.kv_bytes(count) == equal.kv_bytes(count)


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda: Requests(()), "--context"),
        (lambda: equal_requests(0), "--context"),
        (lambda: equal_requests(1, 0), "--concurrency"),
        (lambda: mixed_requests([(0, 1)], 1), "--context"),
        (lambda: mixed_requests([(1, 0)], 1), "--context"),
    ],
)
def test_bad_requests_name_the_flag(make, flag):
    with pytest.raises(ConfigError, match=flag):
        make()
