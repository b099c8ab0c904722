"""One request's average part of an iteration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One request's average share of an iteration.

    Attributes:
        seconds: Forward time, in seconds.
        tokens: Tokens emitted.
        link_s: Link time, in seconds.
    """

    seconds: float
    tokens: float
    link_s: float = 0.0
