"""Whether a drafter's requests draft here, are decoded here or at their verifier.

By measured times, in place of the linear program of arXiv:2605.17613, appendix A.2.
Every request that is not read whole is opened at a verifier and begins there, so what
it would cost to stay is measured right before it drafts, the load of both pools
included.
"""

from __future__ import annotations

from itertools import cycle
from math import inf

from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.paths import ALIKE

EXPLORE = 16
"""One of so many requests drafts here, at least: paces change. One of so many is read
whole whose load alone is faster than its verifier."""
START = 0.5
"""Share of requests that draft here beside others, before that is measured. Of one that
is alone a verifier has no other to decode."""
GAIN = 0.25
"""Change of the share with every request, over how much faster drafting here is."""
LEAST_TOKENS = 32
"""Tokens of a request after which its own pace says whether it goes on."""
SLOWER = 1.25
"""It returns if it takes so many times what it would take at its verifier: after
``LEAST_TOKENS``, or the time that so many may take."""
MOST_SLOWDOWN = 100.0
"""Largest one that is believed."""


class DraftingShare:
    """Share of requests that draft here.

    It grows while these are the faster ones, which relieves the verifiers, until
    requests are as fast there.

    Args:
        start: The share before that is measured.

    Attributes:
        value: The share.
        slowdown: Time of a request that drafts here, per token, as a multiple of the
            time at its verifier under the same load; 0: not measured.
    """

    def __init__(self, start: float) -> None:
        self.value = start
        self.slowdown = Ewma(0.0, least=0.0, most=MOST_SLOWDOWN)
        # Requests that should have drafted here, less those that did.
        self._due = 1 - start

    def next(self) -> bool:
        """Return whether the next request is to draft here."""
        if self.slowdown.value:
            share = self.value + GAIN * (1 - self.slowdown.value)
            self.value = min(max(share, 1 / EXPLORE), 1.0)
        self._due += self.value
        drafts = self._due >= 1
        self._due -= drafts
        return drafts


class PathPaces:
    """Paces of the paths of one drafter, as one request sees them.

    Args:
        near: Seconds per token of requests that verifiers decode; 0: not measured.
        first: Seconds to the first token there.

    Attributes:
        whole: Seconds per token of a request that is read whole and decoded here,
            behind the time predicted for its load; 0: not measured.
    """

    def __init__(self, near: Ewma, first: Ewma) -> None:
        self.near, self.first = near, first
        self.whole = Ewma(0.0, least=0.0, most=inf)
        # Of requests that are alone, and of those beside others.
        self._shares = DraftingShare(1 / EXPLORE), DraftingShare(START)
        # Which of those that look slower are read whole all the same.
        self._wholes = cycle((True, *(False,) * (EXPLORE - 1)))

    def reads_whole(self, load_s: float, tokens: int, *, others: bool) -> bool:
        """Return whether the next request reads its full KV and is decoded here (B2).

        Args:
            load_s: Time until all of it is here, in seconds.
            tokens: Tokens that the request may emit.
            others: Other requests of this drafter are at verifiers. One that takes no
                time of these may end somewhat later, as in ``PathChoice``.
        """
        near = self.near.value
        near_s = self.first.value + tokens * near
        if not near:
            return False
        latest = near_s * (1 + ALIKE * others)
        if load_s + tokens * (self.whole.value or near) < latest:
            return True
        return load_s < near_s and next(self._wholes)

    def observe_whole(self, seconds: float, load_s: float, tokens: int) -> None:
        """Record the time of a request that was read whole.

        Args:
            seconds: Since it came.
            load_s: What its load was predicted to take.
            tokens: What it has emitted.
        """
        if tokens:
            self.whole.observe((seconds - load_s) / tokens)

    def drafts(self, *, others: bool) -> bool:
        """Return whether the next request is to draft here.

        Args:
            others: See ``reads_whole``.
        """
        return self._shares[others].next()

    def completes(self, rest_s: float, tokens: int, *, others: bool) -> bool:
        """Return whether residual KV comes while drafts are needed (section 5.3).

        Args:
            rest_s: Time until it is here, in seconds.
            tokens: Tokens that the request may still emit.
            others: See ``reads_whole``.
        """
        slowdown = self._shares[others].slowdown.value or 1.0
        return rest_s < tokens * self.near.value * slowdown

    def observe(self, seconds: float, tokens: int, *, others: bool) -> None:
        """Record the pace of a request that drafts here.

        Args:
            seconds: Since its first verdict.
            tokens: What it has emitted since, >= 1.
            others: See ``reads_whole``.
        """
        if self.near.value:
            slowdown = self._shares[others].slowdown
            slowdown.observe(seconds / (tokens * self.near.value))

    def returns(self, seconds: float, tokens: int) -> bool:
        """Return whether a request that drafts here is better off at its verifier.

        Args:
            seconds: See ``observe``.
            tokens: See ``observe``.
        """
        stayed = max(tokens, LEAST_TOKENS) * self.near.value
        return seconds > SLOWER * stayed > 0.0
