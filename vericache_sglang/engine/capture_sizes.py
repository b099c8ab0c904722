"""For which sizes of a mixed batch CUDA graphs are captured, and how batches fit them.

A graph replays as many rows and tokens as it was captured with. Which row has how many
tokens is read on the device (``vericache_kernels.ragged_attention``), so two numbers
say what a graph serves: rows that draft or decode have one token, those that are
verified up to one more than were drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EAGER_COUNTER = "eager_forwards"
"""Counter of decodes and verifications that ran eagerly although there are graphs."""

STEADY_MIXES = 8
"""Up to so many numbers of verifications have a size of their own."""


@dataclass(frozen=True, slots=True, order=True)
class CaptureSize:
    """What one graph serves.

    Attributes:
        tokens: Query tokens of all rows together.
        rows: Rows with at least one token.
    """

    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """A batch filled up to a captured size.

    Attributes:
        lengths: Query tokens of every row; those of dummy rows, at the end, are 0.
        spare: Tokens behind the last row's that belong to no row.
    """

    lengths: tuple[int, ...]
    spare: int


def capture_sizes(
    max_running: int, draft_length: int, max_verifies: int, *, multiple: int = 1
) -> tuple[CaptureSize, ...]:
    """List the sizes to capture, ascending.

    Sizes grow by at most a quarter, so less than a quarter of a batch's own tokens is
    added to it, besides rounding up to ``multiple``. Batches of a full server, in which
    everyone drafts but for 0, 1, ... verifications of full length, have sizes of their
    own and waste nothing.

    Args:
        max_running: Most rows of a batch, at least 1.
        draft_length: Most drafts that are verified together, at least 1.
        max_verifies: Most rows that are verified in one forward, at least 1.
        multiple: Tokens of every size are a multiple of it; SGLang 0.5.21 captures
            multiples of ``draft_length + 1`` only.

    Raises:
        ValueError: An argument is below its least value.
    """
    for name, number in (
        ("max_running", max_running),
        ("draft_length", draft_length),
        ("max_verifies", max_verifies),
        ("multiple", multiple),
    ):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    together = min(max_verifies, max_running)
    most = max_running + together * draft_length
    tokens, size = {most}, 1
    while size < most:
        tokens.add(size)
        size = max(size + 1, size * 5 // 4)
    if together <= STEADY_MIXES:
        tokens |= {max_running + n * draft_length for n in range(together)}
    rounded = {-(-size // multiple) * multiple for size in tokens}
    return tuple(CaptureSize(n, min(n, max_running)) for n in sorted(rounded))


def fitting_size(
    sizes: Sequence[CaptureSize], lengths: Sequence[int]
) -> CaptureSize | None:
    """Return the smallest size that holds a batch; None: it runs without a graph.

    Args:
        sizes: From ``capture_sizes``.
        lengths: Query tokens of every row.
    """
    rows, tokens = len(lengths), sum(lengths)
    fits = (size for size in sizes if size.tokens >= tokens and size.rows >= rows)
    return min(fits, default=None)


def padded_rows(lengths: Sequence[int], size: CaptureSize) -> PaddedRows:
    """Fill a batch up to a captured size.

    Args:
        lengths: Query tokens of every row, at least 1 each.
        size: At least as large, from ``fitting_size``.

    Raises:
        ValueError: The batch does not fit, or a row has no token.
    """
    dummies, spare = size.rows - len(lengths), size.tokens - sum(lengths)
    if dummies < 0 or spare < 0 or min(lengths, default=1) < 1:
        raise ValueError(f"rows of {list(lengths)} tokens do not fit {size}")
    return PaddedRows((*lengths, *[0] * dummies), spare)
