"""What a segment and those that follow it save, priced from the ends of the branches.

A segment is of no use without those before it, and it is used whenever one that follows
it is. Hence, with the chance of the most used segment of the branch,

    worth = max(0, chance * (prefill - restore) + worth of what follows directly)

is what the branch saves, in seconds: a match goes as far as that pays.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from vericache_sglang.prefix_cache.columns import ABSENT, ROOT
from vericache_sglang.prefix_cache.restore_costs import LEAST_CHANCE

if TYPE_CHECKING:
    from vericache_sglang.prefix_cache.index import SegmentIndex
    from vericache_sglang.prefix_cache.restore_costs import Prices
    from vericache_sglang.prefix_cache.segment import Tier


class Branches:
    """Every segment with those that follow it: arrays of figures, by the same places.

    Segments are listed children first, of equals the one longest in the index first.
    What is summed up along branches goes level by level, a level being the segments
    that start at one token: a loop over the longest prompt, not over all segments.

    Args:
        index: All segments; may change afterwards.
        tier: Where room is needed: unpinned segments with a part there may leave.
        now: Time, in seconds.
        prices: What transfers and prefills take.

    Attributes:
        rows: [n] int64, rows of ``SegmentIndex.columns``, children first.
        first: Slice of the segments that begin a prompt, or seem to; the last one.
        levels: Slices of places, those deepest in prompts first; but for the last one,
            whose segments follow nothing.
        parents: [n] int64, place of the one before each; ROOT or ABSENT (the last two
            places of ``below_s`` and the like) where there is none.
        nbytes: [2, n] float64, of complement and draft part; 0: there is none.
        tier: [2, n] int64, where they are.
        here: [2, n] bool, which of them are in the tier.
        pinned: [n] bool.
        stored: [n] bool.
        chance: [n] float64, of a use soon, in (0, 1].
        own_s: [n] float64, seconds that restoring the segment saves, times the chance;
            may be negative, and is -inf when a part of it is gone.
        below_s: [n + 2] float64, worth of what follows, in seconds, where it is now.
        kept_s: [n + 2] float64, the same without what leaves the tier before.
        pays: [n + 2] bool, whether a match gets there and restoring it pays.
    """

    def __init__(
        self, index: SegmentIndex, tier: Tier, now: float, prices: Prices
    ) -> None:
        columns = index.columns
        rows = np.flatnonzero(columns.rank)
        self.rows = rows = rows[np.argsort(columns.rank[rows])]
        count = len(rows)
        place_of = np.empty(len(columns) + 2, np.int64)
        place_of[rows] = np.arange(count)
        place_of[ROOT], place_of[ABSENT] = ROOT, ABSENT
        self.parents = place_of[columns.parent[rows]]
        start = columns.start[rows]
        ends = [*(np.flatnonzero(np.diff(start)) + 1).tolist(), count]
        slices = [slice(a, b) for a, b in pairwise([0, *ends])]
        self.levels, self.first = slices[:-1], slices[-1]
        self.nbytes, self.tier = columns.nbytes[:, rows], columns.tier[:, rows]
        self.here = self.tier == tier
        self.pinned, self.stored = columns.pinned[rows], columns.stored[rows]
        self._whole = self.nbytes[1] == 0
        # One place more, for a part there is not.
        self._terms = [np.array([*each, 0.0]) for each in prices.by_tier]
        past = np.maximum(now - columns.last_use[rows], 0.0)
        uses = columns.uses[rows] * np.power(2.0, -past / index.half_life_s)
        self.chance = np.maximum(-np.expm1(-self._most(uses)), LEAST_CHANCE)
        tokens = columns.tokens[rows]
        square = tokens * (2 * start + tokens)  # see ``Prices.prefill_s``
        prefill_s = prices.prefill_s_per_token * tokens
        prefill_s = prefill_s + prices.prefill_s_per_square * square
        self.own_s = self.chance * (prefill_s - self._restore_s())
        self.below_s, self.kept_s = np.zeros(count + 2), np.zeros(count + 2)
        self._weigh()
        self.savings_s = np.maximum(0.0, self.own_s + self.below_s[:count])
        self.pays = self._reached()

    def lost_s(self) -> np.ndarray:
        """Return [n] seconds lost if a segment goes when its turn comes, >= 0."""
        lost_s: np.ndarray = np.maximum(0.0, self.own_s + self.kept_s[:-2])
        return lost_s

    def _most(self, uses: np.ndarray) -> np.ndarray:
        """Return, of each segment and all that follow it, the largest of ``uses``."""
        most = np.zeros(len(uses) + 2)
        for level in self.levels:
            np.maximum(uses[level], most[level], out=most[level])
            np.maximum.at(most, self.parents[level], most[level])
        np.maximum(uses[self.first], most[self.first], out=most[self.first])
        return most[: len(uses)]

    def _restore_s(self) -> np.ndarray:
        """Return what bringing each segment to the device takes (``restore_s``)."""
        seconds = np.zeros(len(self.rows))
        for kind in (0, 1):
            latency_s, rate = self._fetch_terms(kind, self.tier[kind])
            seconds = seconds + latency_s + rate * self.nbytes[kind]
        return seconds

    def slower_s(self, kind: int, lower: Tier) -> np.ndarray:
        """Return [n] seconds by which bringing a part from ``lower`` takes longer."""
        there_s, there = self._fetch_terms(kind, int(lower))
        here_s, here = self._fetch_terms(kind, self.tier[kind])
        longer_s: np.ndarray = there_s - here_s + (there - here) * self.nbytes[kind]
        return longer_s

    def _fetch_terms(
        self, kind: int, tier: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the terms of ``Prices.fetch_s``: seconds, and seconds per byte.

        A draft part stays, and so does a whole segment.
        """
        latency_s, passing, staying = self._terms
        if kind:
            return latency_s[tier], staying[tier]
        return latency_s[tier], np.where(self._whole, staying[tier], passing[tier])

    def _weigh(self) -> None:
        """Sum up what follows each segment."""
        stays = self.pinned | ~self.here.any(0)
        some_stay = bool(stays.any())
        below_s, kept_s = self.below_s, self.kept_s
        for level in self.levels:
            above = self.parents[level]
            savings_s = self.own_s[level] + below_s[level]
            np.add.at(below_s, above, np.maximum(savings_s, 0.0))
            if some_stay:
                lost_s = np.maximum(self.own_s[level] + kept_s[level], 0.0)
                staying = stays[level] & (savings_s > 0)
                np.add.at(kept_s, above, np.where(staying, lost_s, 0.0))

    def _reached(self) -> np.ndarray:
        pays = np.zeros(len(self.rows) + 2, np.bool_)
        pays[ROOT] = True
        savings = self.savings_s > 0
        if savings.all() and (self.parents != ABSENT).all():
            pays[:ABSENT] = True
            return pays
        for level in (self.first, *reversed(self.levels)):
            pays[level] = savings[level] & pays[self.parents[level]]
        return pays
