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
"""Share of requests that draft here beside others, before that is measured. By one that
is alone no verifier is relieved."""
GAIN = 0.25
"""Change of the share with every request, over how much faster drafting here is."""
LEAST_TOKENS = 32
"""Tokens of a request after which its own pace says whether it goes on."""
SLOWER = 1.25
"""It returns if it takes so many times what it would take at its verifier: after
``LEAST_TOKENS``, or the time that so many may take."""
MOST_SLOWDOWN = 100.0
"""Largest one that is believed."""


class PathPaces:
    """Paces of the paths of one drafter, as its requests see them under one load.

    Args:
        near: Seconds per token of requests that verifiers decode; 0: not measured.
        first: Seconds to the first token there.
        others: The load: whether other requests of this drafter are at verifiers.

    Attributes:
        whole: Seconds per token of a request that is read whole and decoded here,
            behind the time predicted for its load; 0: not measured.
        slowdown: Time of a request that drafts here, per token, as a multiple of the
            time at its verifier under the same load; 0: not measured.
        share: Share of requests that draft here. It grows while these are the faster
            ones, which relieves the verifiers, until requests are as fast there.
    """

    def __init__(self, near: Ewma, first: Ewma, *, others: bool) -> None:
        self.near, self.first = near, first
        self._others = others
        self.slowdown = Ewma(0.0, least=0.0, most=MOST_SLOWDOWN)
        self.whole = Ewma(0.0, least=0.0, most=inf)
        self.share = START if others else 1 / EXPLORE
        # Requests that should have drafted here, less those that did.
        self._due = 0.0
        # Which of those that look slower are read whole all the same.
        self._wholes = cycle((True, *(False,) * (EXPLORE - 1)))

    def reads_whole(self, load_s: float, tokens: int, queued_s: float = 0.0) -> bool:
        """Return whether the next request reads its full KV and is decoded here (B2).

        Beside others it may end somewhat later, as in ``PathChoice``: it takes no time
        of a verifier. But what is being read counts twice: it relieves the verifiers
        too, and the times there are those of before.

        Args:
            load_s: Time until all of it is here, in seconds; infinite before the link
                was measured.
            tokens: Tokens that the request may emit.
            queued_s: Time of it in which other requests are read.
        """
        near = self.near.value
        near_s = self.first.value + tokens * near
        if not near or load_s == inf:  # not measured: nothing queued would be NaN
            return False
        latest = near_s * (1 + ALIKE * self._others)
        if queued_s + load_s + tokens * (self.whole.value or near) < latest:
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

    def drafts(self) -> bool:
        """Return whether the next request is to draft here."""
        if self.slowdown.value:
            share = self.share + GAIN * (1 - self.slowdown.value)
            self.share = min(max(share, 1 / EXPLORE), 1.0)
        self._due += self.share
        drafts = self._due >= 1
        self._due -= drafts
        return drafts

    def completes(self, rest_s: float, tokens: int) -> bool:
        """Return whether residual KV comes while drafts are needed (section 5.3).

        Args:
            rest_s: Time until it is here, in seconds.
            tokens: Tokens that the request may still emit.
        """
        return rest_s < tokens * self.near.value * (self.slowdown.value or 1.0)

    def observe(self, seconds: float, tokens: int) -> None:
        """Record the pace of a request that drafts here.

        Args:
            seconds: Since its first verdict.
            tokens: What it has emitted since, >= 1.
        """
        if self.near.value:
            self.slowdown.observe(seconds / (tokens * self.near.value))

    def returns(self, seconds: float, tokens: int) -> bool:
        """Return whether a request that drafts here is better off at its verifier.

        Args:
            seconds: See ``observe``.
            tokens: See ``observe``.
        """
        stayed = max(tokens, LEAST_TOKENS) * self.near.value
        return seconds > SLOWER * stayed > 0.0
