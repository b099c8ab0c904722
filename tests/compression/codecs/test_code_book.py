"""Code books: nearest entries by brute force, k-means by its own definition."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.compression.codecs.code_book import fit_book, nearest
from vericache_sglang.errors import CompressionError

NUMBERS = st.floats(-1e3, 1e3, width=32)


def cost(points, weights, book):
    """Sum of weighted squared distances to the nearest entry, entry by entry."""
    return sum(
        w * min((x - entry) ** 2 for entry in book)
        for x, w in zip(points, weights, strict=True)
    )


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.lists(NUMBERS, max_size=30))
@settings(deadline=None)
def test_no_entry_is_nearer(book, numbers):
    book = torch.tensor(sorted(book))
    codes = nearest(torch.tensor(numbers), book)
    for number, code in zip(numbers, codes.tolist(), strict=True):
        best = min(abs(entry - number) for entry in book.tolist())
        assert abs(float(book[code]) - number) <= best * (1 + 1e-5) + 1e-4


def test_ties_go_down_and_infinities_to_the_ends():
    book = torch.tensor([-1.0, 0.0, 2.0])
    numbers = torch.tensor([-0.5, 1.0, -torch.inf, torch.inf, torch.nan])
    assert nearest(numbers, book).tolist()[:4] == [0, 1, 0, 2]
    assert 0 <= int(nearest(numbers, book)[4]) < 3


@given(
    st.lists(st.tuples(NUMBERS, st.integers(1, 9)), min_size=1, max_size=60),
    st.integers(1, 8),
)
@settings(deadline=None)
def test_the_book_is_a_fixed_point(pairs, count):
    points, weights = zip(*pairs, strict=True)
    book = fit_book(torch.tensor(points), torch.tensor(weights), count, 500)
    assert book.shape == (count,)
    assert (book.diff() >= 0).all()
    members = {}
    for x, w in pairs:
        entry = min(book.tolist(), key=lambda entry: (abs(entry - x), entry))
        members.setdefault(entry, []).append((x, w))
    for entry, owned in members.items():
        mean = sum(x * w for x, w in owned) / sum(w for _, w in owned)
        assert entry == pytest.approx(mean, rel=1e-4, abs=1e-3)


def test_separate_clusters_are_found_exactly():
    points = [0.0, 0.1, 0.2, 5.0, 5.2, 9.0, 9.5, 10.0]
    book = fit_book(torch.tensor(points), torch.ones(8), 3)
    assert book.tolist() == pytest.approx([0.1, 5.1, 9.5])
    cuts = itertools.combinations(range(1, 8), 2)
    best = min(
        cost(
            points,
            [1] * 8,
            [sum(p) / len(p) for p in (points[:a], points[a:b], points[b:])],
        )
        for a, b in cuts
    )
    assert cost(points, [1] * 8, book.tolist()) == pytest.approx(best, rel=1e-4)


def test_a_weight_is_that_many_points():
    points = torch.randn(200, generator=torch.Generator().manual_seed(0))
    weights = torch.randint(1, 4, (200,), generator=torch.Generator().manual_seed(1))
    weighted = fit_book(points, weights, 4)
    repeated = points.repeat_interleave(weights)
    torch.testing.assert_close(
        weighted, fit_book(repeated, torch.ones(len(repeated)), 4)
    )


def test_rounds_never_cost_more():
    points = torch.randn(500, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(500, generator=torch.Generator().manual_seed(1))
    costs = [
        cost(
            points.tolist(), weights.tolist(), fit_book(points, weights, 8, n).tolist()
        )
        for n in (0, 1, 2, 5, 20, 100)
    ]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]


@pytest.mark.parametrize(
    ("points", "weights", "says"),
    [
        ([], [], "must be lists of one length, not empty"),
        ([1.0], [1.0, 2.0], "must be lists of one length"),
        ([1.0], [0.0], "all weights are zero"),
        ([torch.nan], [1.0], "must be finite"),
        ([1.0], [-1.0], "must be finite"),
    ],
)
def test_what_has_no_book_is_refused(points, weights, says):
    with pytest.raises(CompressionError, match=says):
        fit_book(torch.tensor(points), torch.tensor(weights), 2)
