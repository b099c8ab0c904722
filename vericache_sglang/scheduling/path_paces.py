"""When a drafter's request would end on each path, by what was measured.

Every request that is not read whole is opened at a verifier and begins there, so what
it would cost to stay is measured right before it drafts, the load of both pools
included.
"""

from __future__ import annotations

from itertools import cycle
from math import inf
from typing import TYPE_CHECKING

from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.paths import Path, PathChoice

if TYPE_CHECKING:
    from collections.abc import Mapping

EXPLORE = 16
"""One of so many requests tries a path that was slower: paces change."""
LATER = 1.0
"""How much later than on its first path a request may end, as a part, where as many
come as can be served. In ``PathChoice`` it is ``ALIKE``, by what is queued now; means
of the past lag behind that, and paths that look slow for a while would be left out."""
LEAST_TOKENS = 32
"""Tokens of a request after which its own pace says whether it goes on."""
SLOWER = 1.25
"""It returns if it takes so many times what it would take at its verifier, or beside
others as much more as it may end later: after ``LEAST_TOKENS``, or the time that so
many may take."""
TOKEN_WEIGHT = 0.02
"""Weight of a token in the mean slowdown."""
MOST_SLOWDOWN = 100.0
"""Largest one that is believed."""


class PathPaces:
    """Paces of the paths of one drafter, as its requests see them under one load.

    Args:
        near: Seconds per token of requests that verifiers decode; 0: not measured.
        first: Seconds to the first token there.
        others: The load: whether other requests of this drafter are at verifiers. By
            one that is alone no verifier is relieved.

    Attributes:
        whole: Seconds per token of a request that is read whole and decoded here,
            behind the time predicted for its load; 0: not measured.
        slowdown: Time of a request that drafts here, per token, as a multiple of the
            time at its verifier under the same load; 0: not measured.
    """

    def __init__(self, near: Ewma, first: Ewma, *, others: bool) -> None:
        self.near, self.first = near, first
        self._others = others
        self.slowdown = Ewma(0.0, least=0.0, most=MOST_SLOWDOWN, weight=TOKEN_WEIGHT)
        self.whole = Ewma(0.0, least=0.0, most=inf)
        self._tried = 0
        # Which requests try another path.
        self._tries = cycle((*(False,) * (EXPLORE - 1), True))

    def ends_s(
        self, tokens: float, draft_s: float, load_s: float, queued_s: float
    ) -> dict[Path, float]:
        """Return when a request would end on each path, in seconds from now.

        Args:
            tokens: Tokens that it is expected to emit, > 0.
            draft_s: Time until its draft KV is here; infinite if it cannot draft.
            load_s: Time until its full KV is here; infinite before the link was
                measured.
            queued_s: Time of it in which other requests are read. It counts twice: they
                relieve the verifiers too, and the times there are those of before.

        Returns:
            Path -> time; infinite where the path makes no sense. Those that begin at a
            verifier are alike before it was measured.
        """
        near, first = self.near.value, self.first.value
        near_s = first + tokens * near
        if not near:
            drafts_s = 0.0 if draft_s < inf else inf
            return {Path.B1: 0.0, Path.P1_CACHED: drafts_s, Path.B2: inf}
        # Until its draft KV is here the verifier decodes it.
        before = max(0.0, draft_s - first) / near
        drafts_s, whole_s = inf, inf
        if before < tokens:
            drafts = (tokens - before) * near * (self.slowdown.value or 1.0)
            drafts_s = first + before * near + drafts
        if load_s < inf:
            whole_s = queued_s + load_s + tokens * (self.whole.value or near)
        return {Path.B1: near_s, Path.P1_CACHED: drafts_s, Path.B2: whole_s}

    def choose(
        self,
        choice: PathChoice,
        ends: Mapping[Path, float],
        load_s: float,
        load: float,
    ) -> Path:
        """Return the path of the next request, and count it.

        It is the one on which it ends first, or beside others one on which it ends not
        much later and that has too few requests. Now and then it is another one.

        Args:
            choice: Counts the requests of each path.
            ends: See ``ends_s``.
            load_s: See ``ends_s``.
            load: Requests that come, as a part of those that can be served; the less
                they are, the less later may a request end.
        """
        first = min(ends, key=lambda path: ends[path])
        path = first
        if self._others:
            path = choice.exchange(first, ends, LATER * load)
        if next(self._tries):
            # Full KV that comes later than an answer is at a verifier is not tried.
            tried = {**ends, Path.B2: inf} if load_s > ends[Path.B1] else ends
            rest = [each for each in tried if each is not path and tried[each] < inf]
            if rest:
                self._tried += 1
                path = rest[self._tried % len(rest)]
        if self._others:
            choice.took(path)
        return path

    def observe_whole(self, seconds: float, load_s: float, tokens: int) -> None:
        """Record the time of a request that was read whole.

        Args:
            seconds: Since it came.
            load_s: What its load was predicted to take.
            tokens: What it has emitted.
        """
        if tokens:
            self.whole.observe((seconds - load_s) / tokens)

    def completes(self, rest_s: float, tokens: int) -> bool:
        """Return whether residual KV comes while drafts are needed (section 5.3).

        Args:
            rest_s: Time until it is here, in seconds.
            tokens: Tokens that the request may still emit.
        """
        return rest_s < tokens * self.near.value * (self.slowdown.value or 1.0)

    def observe(self, seconds: float, tokens: int) -> None:
        """Record what a verdict gave a request that drafts here.

        Args:
            seconds: Since the verdict before, so that the load is that of now.
            tokens: Emitted since, >= 1.
        """
        if self.near.value:
            self.slowdown.observe(seconds / (tokens * self.near.value), tokens)

    def returns(self, seconds: float, tokens: int, load: float) -> bool:
        """Return whether a request that drafts here is better off at its verifier.

        Args:
            seconds: Since its first verdict.
            tokens: What it has emitted since, >= 1.
            load: See ``choose``.
        """
        stayed = max(tokens, LEAST_TOKENS) * self.near.value
        slower = SLOWER + LATER * load * self._others
        return seconds > slower * stayed > 0.0
