"""Ring against a dictionary of windows, and the refusals that keep its sums exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.ring import Ring


def contents(ring):
    return [ring.used(ring.now + i) for i in range(ring.windows)]


def test_a_reservation_lands_in_its_windows():
    ring = Ring(windows=5, limit=10)
    ring.reserve(1, 3, 4)
    assert contents(ring) == [0, 4, 4, 4, 0]
    assert ring.room(0, 4) == [10, 6, 6, 6, 10]


def test_slide_drops_the_current_window_and_empties_the_new_one():
    ring = Ring(windows=3, limit=10)
    ring.reserve(0, 2, 7)
    ring.slide()
    assert (ring.now, contents(ring)) == (1, [7, 7, 0])
    assert ring.used(0) == 0, "a past window holds nothing"
    ring.reserve(3, 3, 10)
    assert contents(ring) == [7, 7, 10]


@pytest.mark.parametrize(
    ("first", "last", "amount", "fits"),
    [
        (3, 5, 10, True),
        (2, 3, 1, False),
        (5, 6, 1, False),
        (4, 4, 11, False),
        (5, 4, 99, True),
    ],
    ids=["whole-horizon", "past", "beyond", "too-much", "no-window"],
)
def test_fits_at_the_edges(first, last, amount, fits):
    ring = Ring(windows=3, limit=10)
    for _ in range(3):
        ring.slide()
    assert ring.fits(first, last, amount) is fits


def test_release_ignores_windows_that_are_past():
    ring = Ring(windows=4, limit=10)
    ring.reserve(0, 3, 5)
    ring.slide()
    ring.slide()
    ring.release(0, 3, 5)
    assert contents(ring) == [0, 0, 0, 0]
    ring.release(0, 1, 5)  # wholly past


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


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.integers(0, 9),
    st.integers(0, 5),
)
def test_the_ends_of_spans_are_where_they_fit(levels, slid, amount):
    ring = Ring(len(levels), limit=4)
    for _ in range(slid):
        ring.slide()
    for i, level in enumerate(levels):
        ring.reserve(slid + i, slid + i, level)
    for length in range(1, len(levels) + 2):
        ends = [
            i
            for i in range(length - 1, len(levels))
            if all(level + amount <= 4 for level in levels[i - length + 1 : i + 1])
        ]
        assert ring.ends(amount, length) == sum(1 << i for i in ends)
        for i in range(len(levels)):
            fits = ring.fits(slid + i - length + 1, slid + i, amount)
            assert fits is (i in ends)


def test_work_fills_the_earliest_windows_and_is_taken_back():
    ring = Ring(windows=5, limit=10)
    ring.reserve(2, 2, 7)
    assert ring.fill(1, 4, 15) == (10, 3, 2, 0)
    assert contents(ring) == [0, 10, 10, 2, 0]
    ring.slide()
    ring.slide()
    ring.take_back(1, (10, 3, 2, 0))
    assert contents(ring) == [7, 0, 0, 0, 0]


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
    with pytest.raises(InvariantError, match="give back"):
        ring.take_back(2, (5, 1))
    assert contents(ring) == [0, 0, 6, 0, 0]


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.integers(0, 9),
    st.integers(0, 20),
)
def test_spans_cover_where_their_free_sum_does(levels, slid, amount):
    ring = Ring(len(levels), limit=4)
    for _ in range(slid):
        ring.slide()
    for i, level in enumerate(levels):
        ring.reserve(slid + i, slid + i, level)
    for length in range(1, len(levels) + 2):
        covered = [
            i
            for i in range(length - 1, len(levels))
            if sum(4 - level for level in levels[i - length + 1 : i + 1]) >= amount
        ]
        assert ring.covers(amount, length) == sum(1 << i for i in covered)
