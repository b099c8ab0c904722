"""Segments: the tokens of a prompt that are packed and decoded together."""

from __future__ import annotations

SEGMENT = 512
"""Tokens of a segment, a multiple of every codec's block; the most decoded at once."""


def segment_bounds(tokens: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the segments of ``tokens``; the last may be shorter."""
    return [
        (start, min(start + SEGMENT, tokens)) for start in range(0, tokens, SEGMENT)
    ]
