"""Token counts for which CUDA graphs of mixed batches are captured.

A graph replays the number of tokens with which it was captured; the tokens of each row
are read on the device. Rows that draft or decode have one token, verified rows have one
more than were drafted.
"""

from __future__ import annotations

STEP = 32
"""Larger graphs are multiples of this: it fills the tiles of the layers' matrix
products, and is one verification at draft length 31."""


def graph_tokens(
    max_running: int, draft_length: int, max_verifies: int, proposals: int = 0
) -> tuple[int, ...]:
    """Return the tokens of every graph, ascending; the last is the largest batch.

    Up to ``STEP`` tokens, where reads of the weights dominate, sizes double. Above,
    they grow by one step, or by at most a quarter.

    Args:
        max_running: Most rows of a batch, >= 1.
        draft_length: Most drafts of a verification, >= 1.
        max_verifies: Most rows verified in one forward, >= 1.
        proposals: Most proposals of an inner drafter in a row, >= 0.

    Raises:
        ValueError: An argument is below its bound.
    """
    for name, number in (
        ("max_running", max_running),
        ("draft_length", draft_length),
        ("max_verifies", max_verifies),
        ("proposals", proposals + 1),
    ):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    most = most_tokens(max_running, draft_length, max_verifies, proposals)
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        more = STEP if size >= STEP else size
        size = max(size + more, size * 5 // 4 // STEP * STEP)
    return (*sizes, most)


def most_tokens(
    max_running: int, draft_length: int, max_verifies: int, proposals: int = 0
) -> int:
    """Return the tokens of the largest mixed batch; see ``graph_tokens``."""
    verified = min(max_verifies, max_running)
    return max_running * (1 + proposals) + verified * draft_length
