"""Segments: the tokens of a prompt that are packed and decoded together."""

from __future__ import annotations

SEGMENT = 512
"""Tokens of a segment, a multiple of every codec's block; the most decoded at once."""


def segment_bounds(tokens: int, run: int = 0) -> list[tuple[int, int]]:
    """Return (start, stop) of the segments of ``tokens``; the last may be shorter.

    Args:
        tokens: Number of tokens.
        run: Tokens of a segment, in [0, SEGMENT]; 0: ``SEGMENT``.
    """
    step = run or SEGMENT
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]
