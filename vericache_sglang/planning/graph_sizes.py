"""For which numbers of tokens CUDA graphs of mixed batches are captured.

A graph replays as many tokens as it was captured with. Which row has how many of them
is read on the device, so two numbers say what a graph serves: rows that draft or decode
have one token, those that are verified one more than were drafted.
"""

from __future__ import annotations

STEP = 32
"""Larger graphs are multiples of this: with it, the matrices of a model's layers fill
their tiles, and of draft length 31 a verification is one step."""


def graph_tokens(
    max_running: int, draft_length: int, max_verifies: int
) -> tuple[int, ...]:
    """List the tokens of every graph, ascending; the last is the largest batch.

    Up to ``STEP`` tokens sizes double, as what is read besides the weights hardly
    counts there. Above they grow by one step, or by at most a quarter.

    Args:
        max_running: Most rows of a batch, at least 1.
        draft_length: Most drafts that are verified together, at least 1.
        max_verifies: Most rows that are verified in one forward, at least 1.

    Raises:
        ValueError: An argument is below its least value.
    """
    for name, number in (
        ("max_running", max_running),
        ("draft_length", draft_length),
        ("max_verifies", max_verifies),
    ):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    most = max_running + min(max_verifies, max_running) * draft_length
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        more = STEP if size >= STEP else size
        size = max(size + more, size * 5 // 4 // STEP * STEP)
    return (*sizes, most)
