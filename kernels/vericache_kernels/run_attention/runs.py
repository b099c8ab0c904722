"""Splits a row of slots into contiguous runs and plans how attention reads them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Row = npt.NDArray[np.signedinteger[Any]]

# Runs shorter than this are copied together: a call of the attention kernel costs
# 20 us on one core, as much as copying about 200 slots.
LEAST_VIEW_SLOTS = 128
# One call over more keys than this accumulates one long float32 sum: at 16K keys its
# error against float64 is 3.6e-6, merged from pieces 0.9e-6 at equal speed.
MOST_SLOTS_A_PART = 2048
# Up to this many queries one call with a mask computes what they see of each other and
# of the entries before them; above it, causal calls skip the masked half.
MOST_MASKED_QUERIES = 160

Piece = tuple[int, int] | torch.Tensor
"""Entries of a row: (start, length) of a run, read in place, or slots to be copied."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Read plan of one row; built once per forward, the same for every layer.

    Attributes:
        slots: [L] int32 or int64 slot ids in row order; the last n are the queries.
        query_len: n, in tokens; L >= n >= 1.
        pieces: What every query sees fully.
        last: The piece that ends with the query tokens, which are masked causally, and
            begins with others only up to ``MOST_MASKED_QUERIES``; None for n = 1 (a
            single query sees its whole row).
    """

    slots: torch.Tensor
    query_len: int
    pieces: tuple[Piece, ...]
    last: Piece | None


def slot_runs(slots: torch.Tensor) -> list[tuple[int, int]]:
    """Return the maximal runs of consecutive slots of a row; O(L), vectorised.

    Args:
        slots: [L] int32 or int64 slot ids in row order, on the CPU.

    Returns:
        (first slot, length) of each run in row order; empty for L = 0.
    """
    first, lengths = _runs(slots.numpy())
    return list(zip(first.tolist(), lengths.tolist(), strict=True))


def run_slots(runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """List the slots of ``runs`` ((first slot, length), row order) as [L] int64."""
    if not runs:
        return torch.empty(0, dtype=torch.int64)
    first, lengths = np.array(runs, dtype=np.int64).T
    before = np.cumsum(lengths) - lengths
    slots = np.repeat(first - before, lengths) + np.arange(int(lengths.sum()))
    return torch.from_numpy(slots)


def plan_row(slots: torch.Tensor, query_len: int) -> RowPlan:
    """Plan which runs of a row are read in place and which are copied together.

    Args:
        slots: [L] int32 or int64 slot ids in row order, on the CPU; copied, so the
            caller may overwrite its table afterwards.
        query_len: n, in tokens.

    Raises:
        ValueError: n is outside [1, L].
    """
    row = slots.numpy().copy()
    if not 1 <= query_len <= row.size:
        raise ValueError(f"{query_len} queries do not fit a row of {row.size} entries")
    # One query sees its whole row, so its own entry needs no causal part.
    before = row.size if query_len == 1 else row.size - query_len
    prefix, own = row[:before], row[before:]
    first, lengths = _runs(prefix)
    short = lengths < LEAST_VIEW_SLOTS
    if np.count_nonzero(short) == 1:  # a single short run is read in place
        short[:] = False
    in_place = list(zip(first[~short].tolist(), lengths[~short].tolist(), strict=True))
    views = [piece for run in in_place for piece in _pieces(*run)]
    gathered = prefix[np.repeat(short, lengths)]
    copied = [
        gathered[i : i + MOST_SLOTS_A_PART]
        for i in range(0, gathered.size, MOST_SLOTS_A_PART)
    ]
    last: Piece | None = None
    if query_len > 1:
        masked = query_len <= MOST_MASKED_QUERIES
        in_run = bool((own[1:] - own[:-1] == 1).all())
        if in_run and masked and views and sum(views[-1]) == own[0]:
            start, length = views.pop()
            last = (start, length + query_len)
        elif masked and copied:
            last = torch.from_numpy(np.concatenate((copied.pop(), own)))
        else:
            last = (int(own[0]), query_len) if in_run else torch.from_numpy(own)
    return RowPlan(
        slots=torch.from_numpy(row),
        query_len=query_len,
        pieces=(*views, *map(torch.from_numpy, copied)),
        last=last,
    )


def _runs(row: Row) -> tuple[Row, Row]:
    """Return first slot and length of each maximal run, [R] each."""
    if row.size == 0:
        return row, row
    breaks = np.flatnonzero(row[1:] - row[:-1] != 1)
    begin = np.concatenate(([0], breaks + 1))
    return row[begin], np.diff(begin, append=row.size)


def _pieces(start: int, length: int) -> list[tuple[int, int]]:
    """Cut one run into (start, length) pieces whose lengths differ by at most one."""
    count = -(-length // MOST_SLOTS_A_PART)
    edges = [start + length * i // count for i in range(count + 1)]
    return [(low, high - low) for low, high in pairwise(edges)]
