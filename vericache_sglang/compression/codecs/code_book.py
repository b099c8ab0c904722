"""Code books of numbers: fitting one (weighted k-means), and the nearest entry."""

from __future__ import annotations

import torch

from vericache_sglang.errors import CompressionError


def nearest(numbers: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest entry; ties go to the lower index.

    Args:
        numbers: Any shape, float; infinities take the ends, NaN any entry.
        book: [n] ascending, the dtype of ``numbers``, n <= 256.

    Returns:
        uint8, in the shape of ``numbers``.
    """
    middles = (book[1:] + book[:-1]) / 2
    # A NaN sorts behind every entry: the last index, which exists.
    return torch.bucketize(numbers, middles).to(torch.uint8)


def fit_book(
    points: torch.Tensor, weights: torch.Tensor, count: int, rounds: int = 50
) -> torch.Tensor:
    """Fit the entries of a book by Lloyd's algorithm in one dimension.

    Starts from quantiles of the weight, so the result is deterministic. The weighted
    squared distance to the nearest entry never grows between iterations.

    Args:
        points: [N] float, finite, N >= 1.
        weights: [N], >= 0, not all zero.
        count: Entries, 1 to 256.
        rounds: Maximum iterations; ends earlier once no entry moves.

    Returns:
        [count] float64, ascending.

    Raises:
        CompressionError: Points or weights are malformed.
    """
    if points.dim() != 1 or points.shape != weights.shape or not len(points):
        raise CompressionError(
            f"code book: points {tuple(points.shape)} and weights "
            f"{tuple(weights.shape)} must be lists of one length, not empty"
        )
    points, order = points.double().sort()
    weights = weights.double()[order]
    if not (
        points.isfinite().all() and weights.isfinite().all() and weights.min() >= 0
    ):
        raise CompressionError("code book: points and weights must be finite numbers")
    mass = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    moment = torch.cat([weights.new_zeros(1), (weights * points).cumsum(0)])
    if mass[-1] <= 0:
        raise CompressionError("code book: all weights are zero")
    steps = torch.arange(count, dtype=torch.float64, device=points.device)
    starts = torch.searchsorted(mass[1:], (steps + 0.5) / count * mass[-1])
    book = points[starts.clamp(max=len(points) - 1)]
    for _ in range(rounds):
        cuts = torch.searchsorted(points, (book[1:] + book[:-1]) / 2, right=True)
        bounds = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), len(points))])
        share = mass[bounds].diff()
        centre = moment[bounds].diff() / share
        # An entry without points keeps its value.
        moved = centre.where(share > 0, book).sort().values
        if torch.equal(moved, book):
            break
        book = moved
    return book
