"""Draft length between two verifications, and when to retry speculation."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from vericache_sglang.errors import InvariantError

FIRST_WAIT = 64
LAST_WAIT = 1024
"""Tokens decoded autoregressively before drafting is retried: least and most."""


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Time that one draft-verify cycle of a request takes.

    What the rows of a batch share, the device's fixed cost and the link, counts with
    one row's share.

    Attributes:
        plain_s: One token decoded autoregressively, in seconds, > 0.
        draft_s: One drafted token, in seconds, > 0.
        verify_s: Fixed part of a verification, in seconds, >= 0.
        verify_token_s: Part of a verification per token, in seconds, >= 0.
        prefetch_s: Link time, in seconds, >= 0, a lower bound of the cycle. 0 when the
            residual KV is on the device.

    Raises:
        InvariantError: A value is out of bounds.
    """

    plain_s: float
    draft_s: float
    verify_s: float
    verify_token_s: float
    prefetch_s: float

    def __post_init__(self) -> None:
        # One object per evaluated choice: comparisons are cheap, and NaN fails them.
        if not (
            0.0 < self.plain_s < inf
            and 0.0 < self.draft_s < inf
            and 0.0 <= self.verify_s < inf
            and 0.0 <= self.verify_token_s < inf
            and 0.0 <= self.prefetch_s < inf
        ):
            raise InvariantError(f"cycle cost out of bounds: {self}")


@dataclass(frozen=True, slots=True)
class LengthChoice:
    """A draft length and its predicted speedup.

    Attributes:
        length: Tokens to draft per draft-verify cycle.
        gain: Speedup over autoregressive decoding.
    """

    length: int
    gain: float


def best_length(p: float, cost: RoundCost, most: int) -> LengthChoice:
    """Return the draft length with the highest gain; ties go to the shorter one.

    The gain is the paper's ideal speedup (arXiv:2605.17613, section 4.3, appendix A.1)
    for one request: a cycle yields the accepted drafts and one bonus token, and lasts
    as long as its forwards or its prefetch, whichever is longer.

    Args:
        p: Acceptance probability per token, in [0, 1].
        cost: Times of a draft-verify cycle.
        most: Longest draft, in tokens, >= 1.

    Returns:
        The best length in [1, most].

    Raises:
        InvariantError: ``most`` is below 1.
    """
    if most < 1:
        raise InvariantError(f"longest draft must be >= 1 token, got {most}")
    each_s = cost.draft_s + cost.verify_token_s
    forward_s = cost.verify_s + cost.verify_token_s
    prefetch_s = cost.prefetch_s
    power = tokens = 1.0
    best, rate = 0, 0.0
    for length in range(1, most + 1):
        power *= p
        tokens += power
        forward_s += each_s
        faster = tokens / (forward_s if forward_s > prefetch_s else prefetch_s)
        # Each draft adds fewer accepted tokens than the one before, and no less time:
        # the first length that is not faster ends the search.
        if faster <= rate:
            break
        best, rate = length, faster
    return LengthChoice(best, rate * cost.plain_s)


class Patience:
    """Exponential back-off: autoregressive tokens before drafting is retried.

    Every retry without a gain doubles the wait, from 64 tokens up to 1024.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = FIRST_WAIT

    def wait(self) -> int:
        """Return the wait in tokens, and double the next one."""
        waited = self._next
        self._next = min(2 * waited, LAST_WAIT)
        return waited

    def reset(self) -> None:
        """Return to the shortest wait, after drafting had a gain."""
        self._next = FIRST_WAIT
