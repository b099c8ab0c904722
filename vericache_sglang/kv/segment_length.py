"""Segments: the tokens of a prompt that are packed and decoded together."""

from __future__ import annotations

SEGMENT = 512
"""Tokens of a segment, a multiple of every codec's block: most decoded at once."""


def segment_bounds(tokens: int) -> list[tuple[int, int]]:
    """Cut ``tokens`` into (start, stop) of whole segments and a shorter last one."""
    return [
        (start, min(start + SEGMENT, tokens)) for start in range(0, tokens, SEGMENT)
    ]
