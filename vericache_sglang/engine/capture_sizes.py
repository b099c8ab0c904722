"""For which sizes of a mixed batch CUDA graphs are captured.

A graph replays as many tokens and rows as it was captured with. Which row has how many
tokens is read on the device, so two numbers say what a graph serves: rows that draft or
decode have one token, those that are verified up to one more than were drafted.
"""

from __future__ import annotations

STEADY_MIXES = 8
"""Up to so many numbers of verifications have a size of their own."""


def batch_sizes(
    max_running: int, draft_length: int, max_verifies: int
) -> tuple[int, ...]:
    """List what SGLang is to capture (``--cuda-graph-bs-decode``), ascending.

    SGLang 0.5.21 multiplies a size by ``draft_length + 1`` to get the graph's tokens; a
    graph has as many rows as tokens, but no more than the largest size. So the last
    size is ``max_running``, although no batch is ever that many tokens. The others grow
    by at most a quarter, so less than a quarter of a batch's own tokens is added to it,
    besides rounding up to a multiple. Batches of a full server, in which everyone
    drafts but for 0, 1, ... verifications of full length, have sizes of their own.

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
    together = min(max_verifies, max_running)
    most = max_running + together * draft_length
    tokens, size = {most}, 1
    while size < most:
        tokens.add(size)
        size = max(size + 1, size * 5 // 4)
    if together <= STEADY_MIXES:
        tokens |= {max_running + n * draft_length for n in range(together)}
    sizes = {-(-size // (draft_length + 1)) for size in tokens}
    return tuple(sorted(sizes | {max_running}))
