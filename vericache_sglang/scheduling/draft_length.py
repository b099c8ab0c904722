"""How many tokens to draft between two verifications, and when to try again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import isfinite

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.acceptance import expected_accepted

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
        reload_s: Link time of one reload, in seconds, >= 0; the round cannot be
            shorter. 0 when the complement is on the device.

    Raises:
        InvariantError: A value is out of bounds.
    """

    plain_s: float
    draft_s: float
    verify_s: float
    verify_token_s: float
    reload_s: float

    def __post_init__(self) -> None:
        whole = self.plain_s + self.draft_s + self.verify_s
        least = min(self.verify_s, self.verify_token_s, self.reload_s)
        if not (
            self.plain_s > 0
            and self.draft_s > 0
            and least >= 0
            and isfinite(whole + self.verify_token_s + self.reload_s)
        ):
            raise InvariantError(f"round cost out of bounds: {self}")

    def round_s(self, length: int) -> float:
        """Return how long a round of ``length`` drafts takes, in seconds."""
        forward_s = (
            length * self.draft_s + self.verify_s + (length + 1) * self.verify_token_s
        )
        return max(forward_s, self.reload_s)


@dataclass(frozen=True, slots=True)
class Choice:
    """A draft length and what it is worth.

    Attributes:
        length: Tokens to draft in a round.
        gain: Speed relative to plain decoding; faster above 1.
    """

    length: int
    gain: float


def gain(p: float, cost: RoundCost, length: int) -> float:
    """Return the speed of drafting ``length`` tokens, relative to plain decoding.

    The paper's ideal speedup (arXiv:2605.17613, section 4.3, appendix A.1) for one
    request: a round yields the accepted drafts and one token of the verifier's own.
    """
    tokens = expected_accepted(p, length) + 1.0
    return tokens * cost.plain_s / cost.round_s(length)


def best_length(p: float, cost: RoundCost, most: int) -> Choice:
    """Return the draft length of the highest gain; the shorter one of two equals.

    Tries a geometric grid, and the lengths at which the round becomes longer than its
    reload: there the gain has a peak as sharp as the reload is dear.

    Args:
        p: Acceptance probability per token, in [0, 1].
        cost: Seconds of a round.
        most: Longest draft, in tokens, >= 1.

    Returns:
        A length in [1, most] within 3 % of the best one's gain.

    Raises:
        InvariantError: ``most`` is below 1.
    """
    if most < 1:
        raise InvariantError(f"longest draft must be >= 1 token, got {most}")
    spare_s = cost.reload_s - cost.verify_s - cost.verify_token_s
    kink = int(min(spare_s / (cost.draft_s + cost.verify_token_s), most))
    peak = {min(max(kink + more, 1), most) for more in (0, 1)}
    best = Choice(1, 0.0)
    for length in sorted(peak.union(_grid(most))):
        worth = gain(p, cost, length)
        if worth > best.gain:
            best = Choice(length, worth)
    return best


@cache
def _grid(most: int) -> tuple[int, ...]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, ... below ``most``, and ``most``."""
    lengths = {1, most}
    power = 2
    while power < most:
        lengths.update((power, power + power // 2))
        power *= 2
    return tuple(sorted(length for length in lengths if length <= most))


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
