"""How many tokens to draft between two verifications, and when to try again."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from vericache_sglang.errors import InvariantError

FIRST_WAIT = 64
LAST_WAIT = 1024
"""Tokens decoded plainly before drafting is tried again: shortest and longest wait."""


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What one round takes of the machine, this request's own share.

    Attributes:
        plain_s: One token decoded plainly, in seconds, > 0.
        draft_s: One drafted token, in seconds, > 0.
        verify_s: A verification without its tokens, in seconds, >= 0.
        verify_token_s: Each token verified, in seconds, >= 0.
        prefetch_s: Link time of one reload, in seconds, >= 0; the round cannot be
            shorter. 0 when the complement is on the device.

    Raises:
        InvariantError: A value is out of bounds.
    """

    plain_s: float
    draft_s: float
    verify_s: float
    verify_token_s: float
    prefetch_s: float

    def __post_init__(self) -> None:
        # One is made for every price: comparisons are cheap, and NaN fails them.
        if not (
            0.0 < self.plain_s < inf
            and 0.0 < self.draft_s < inf
            and 0.0 <= self.verify_s < inf
            and 0.0 <= self.verify_token_s < inf
            and 0.0 <= self.prefetch_s < inf
        ):
            raise InvariantError(f"round cost out of bounds: {self}")


@dataclass(frozen=True, slots=True)
class LengthChoice:
    """A draft length and what it is worth.

    Attributes:
        length: Tokens to draft in a round.
        gain: Speed relative to plain decoding; faster above 1.
    """

    length: int
    gain: float


def best_length(p: float, cost: RoundCost, most: int) -> LengthChoice:
    """Return the draft length of the highest gain; the shorter one of two equals.

    The gain is the paper's ideal speedup (arXiv:2605.17613, section 4.3, appendix A.1)
    for one request: a round yields the accepted drafts and one token of the verifier's
    own, and takes its forwards or its reload, whichever is longer.

    Args:
        p: Acceptance probability per token, in [0, 1].
        cost: Seconds of a round.
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
        # Each draft adds less than the one before, and no less time: once a longer
        # round is not faster, none is.
        if faster <= rate:
            break
        best, rate = length, faster
    return LengthChoice(best, rate * cost.plain_s)


class Patience:
    """How long a request is decoded plainly before drafting is tried again.

    Every try that does not pay doubles the wait, from 64 tokens up to 1024.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = FIRST_WAIT

    def wait(self) -> int:
        """Return the tokens to wait now; the next wait will be twice as long."""
        waited = self._next
        self._next = min(2 * waited, LAST_WAIT)
        return waited

    def reset(self) -> None:
        """Start over with the shortest wait: a round paid."""
        self._next = FIRST_WAIT
