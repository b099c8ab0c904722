"""Non-uniform quantization of rows with a code book, outliers kept exactly."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vericache_sglang.compression.codecs.code_book import nearest


class Scale(NamedTuple):
    """Maps numbers to about [-1, 1]; float32, both broadcast to [N, C].

    Attributes:
        offset: Middle of the range.
        reach: Half of its length, >= 0.
    """

    offset: torch.Tensor
    reach: torch.Tensor

    @staticmethod
    def of(low: torch.Tensor, high: torch.Tensor) -> Scale:
        """Return the scale of the range from ``low`` to ``high``."""
        return Scale((high + low) / 2, (high - low) / 2)

    def normalized(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [N, C] in units of the reach; 0 or infinite where it is 0."""
        return ((rows - self.offset) / self.reach).nan_to_num(
            0, posinf=torch.inf, neginf=-torch.inf
        )


class NuqRows(NamedTuple):
    """N rows of C numbers.

    Attributes:
        codes: [N, C] uint8, indices into the book.
        columns: [N, P] int64, columns of ``exact``; unique per row.
        exact: [N, P] float32.
    """

    codes: torch.Tensor
    columns: torch.Tensor
    exact: torch.Tensor


def encode_rows(
    rows: torch.Tensor,
    scale: Scale,
    book: torch.Tensor,
    distance: torch.Tensor,
    places: int,
) -> NuqRows:
    """Quantize rows.

    Args:
        rows: [N, C] float32.
        book: [n] float32, ascending.
        distance: [N, C], distance from the middle; the largest ones stay exact.
        places: P, number of exact numbers in a row, 0 <= P <= C.
    """
    columns = distance.topk(places, dim=1, sorted=False).indices
    codes = nearest(scale.normalized(rows), book)
    return NuqRows(codes, columns, rows.gather(1, columns))


def decode_rows(coded: NuqRows, scale: Scale, book: torch.Tensor) -> torch.Tensor:
    """Decode to [N, C] float32 in the rows' own units, with the exact numbers."""
    rows = book[coded.codes.to(torch.int64)] * scale.reach + scale.offset
    return rows.scatter(1, coded.columns, coded.exact)


def inner_range(
    rows: torch.Tensor, outliers: float
) -> tuple[Scale, torch.Tensor, torch.Tensor]:
    """Find each row's outliers, and the scale of its other numbers.

    An outlier is at or beyond the percentile ``outliers / 2`` from either end, so a row
    has at least two. Percentiles are interpolated between neighbours.

    Args:
        rows: [N, C] float32, finite.
        outliers: Share of C, in [0, 1).

    Returns:
        Scale, fields [N, 1], of the row with outliers replaced by its median; outlier
        mask [N, C] bool; and distances [N, C], >= 1 exactly for outliers, up to
        rounding.
    """
    ordered = rows.sort(dim=1).values
    last = rows.shape[1] - 1
    low = _percentile(ordered, outliers / 2)
    high = _percentile(ordered, 1 - outliers / 2)
    outside = (rows <= low) | (rows >= high)
    inner = rows.where(~outside, ordered[:, last // 2, None])
    scale = Scale.of(inner.amin(1, keepdim=True), inner.amax(1, keepdim=True))
    return scale, outside, Scale.of(low, high).normalized(rows).abs()


def _percentile(ordered: torch.Tensor, share: float) -> torch.Tensor:
    """Return quantiles [N, 1] of ascending rows; torch's takes at most 16M numbers."""
    place = share * (ordered.shape[1] - 1)
    below = min(int(place), ordered.shape[1] - 1)
    above = min(below + 1, ordered.shape[1] - 1)
    return torch.lerp(ordered[:, below], ordered[:, above], place - below)[:, None]
