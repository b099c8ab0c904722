"""Ring against a dictionary of windows, and the refusals that keep its sums exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.ring import Ring


def contents(ring):
    return [ring.used(ring.now + i) for i in range(ring.windows)]


@pytest.mark.parametrize(
    ("action", "first", "last", "amount"),
    [
        ("reserve", 0, 2, 8),
        ("reserve", 2, 4, 1),
        ("reserve", 0, 0, -1),
        ("release", 0, 2, 3),
        ("release", 1, 4, 3),
        ("release", 1, 1, -1),
    ],
    ids=["over", "beyond", "negative", "one-too-few", "beyond-back", "negative-back"],
)
def test_what_does_not_add_up_is_refused_and_changes_nothing(
    action, first, last, amount
):
    ring = Ring(windows=4, limit=10)
    ring.reserve(1, 2, 3)
    with pytest.raises(InvariantError):
        getattr(ring, action)(first, last, amount)
    assert contents(ring) == [0, 3, 3, 0]


@pytest.mark.parametrize(("windows", "limit"), [(0, 1), (1, -1)])
def test_an_impossible_ring_is_refused(windows, limit):
    with pytest.raises(InvariantError, match="cannot be"):
        Ring(windows, limit)


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "release", "slide"]),
            st.integers(0, 12),
            st.integers(0, 5),
            st.integers(0, 5),
        )
    ),
)
def test_every_history_equals_a_dictionary_of_windows(windows, history):
    ring, book, limit = Ring(windows, 6), {}, 6
    for action, first, length, amount in history:
        last = first + length
        span = range(first, last + 1)
        inside = all(ring.now <= w < ring.now + windows for w in span)
        ahead = [w for w in span if w >= ring.now]
        fits = inside and all(book.get(w, 0) + amount <= limit for w in span)
        if action == "slide":
            ring.slide()
        elif action == "reserve":
            assert ring.fits(first, last, amount) is fits
            if fits:
                ring.reserve(first, last, amount)
                book.update({w: book.get(w, 0) + amount for w in span})
        elif all(w < ring.now + windows and book.get(w, 0) >= amount for w in ahead):
            ring.release(first, last, amount)
            book.update({w: book.get(w, 0) - amount for w in ahead})
        now = ring.now
        assert contents(ring) == [book.get(now + i, 0) for i in range(windows)]
        assert max(contents(ring)) <= limit
        assert ring.used(now - 1) == ring.used(now + windows) == 0
        free = [limit - used for used in contents(ring)]
        assert ring.room(now - 1, now + windows) == [0, *free, 0]


@pytest.mark.parametrize(
    ("first", "last", "amount"),
    [(1, 2, 15), (0, 1, -1), (3, 5, 1)],
    ids=["too-much", "negative", "beyond"],
)
def test_work_that_does_not_fit_is_refused_and_changes_nothing(first, last, amount):
    ring = Ring(windows=5, limit=10)
    ring.reserve(2, 2, 6)
    with pytest.raises(InvariantError, match="not free in windows"):
        ring.fill(first, last, amount)
    with pytest.raises(InvariantError, match="cannot free"):
        ring.take_back(2, (5, 1))
    assert contents(ring) == [0, 0, 6, 0, 0]


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.integers(0, 9),
    st.integers(0, 20),
)
def test_spans_end_where_each_window_or_their_sum_has_room(levels, slid, amount):
    ring = Ring(len(levels), limit=4)
    for _ in range(slid):
        ring.slide()
    for i, level in enumerate(levels):
        ring.reserve(slid + i, slid + i, level)
    for length in range(1, len(levels) + 2):
        fitting = covering = 0
        for i in range(length - 1, len(levels)):
            free = [4 - level for level in levels[i - length + 1 : i + 1]]
            fitting |= (min(free) >= amount) << i
            covering |= (sum(free) >= amount) << i
        assert ring.ends(amount, length) == fitting
        assert ring.covers(amount, length) == covering
        for i in range(len(levels)):
            fits = ring.fits(slid + i - length + 1, slid + i, amount)
            assert fits is bool(fitting >> i & 1)
