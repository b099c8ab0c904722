"""One request's average part of an iteration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """What one request adds to an average iteration.

    Attributes:
        seconds: Forward time it adds, in seconds.
        tokens: Tokens it emits.
        link_s: Link time it takes, in seconds.
    """

    seconds: float
    tokens: float
    link_s: float = 0.0
