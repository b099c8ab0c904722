"""Computes the seconds that cached segments save, from the leaves of the prefix tree.

A segment is useless without its predecessors, and it is used whenever one of its
descendants is. With the reuse chance of the most used segment of the branch,

    savings = max(0, chance * (prefill - restore) + savings of the direct children)

is what the branch saves, in seconds. A match extends as far as savings are positive.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from vericache_sglang.prefix_cache.columns import ABSENT, ROOT
from vericache_sglang.prefix_cache.restore_costs import reuse_chance

if TYPE_CHECKING:
    from vericache_sglang.prefix_cache.index import SegmentIndex
    from vericache_sglang.prefix_cache.restore_costs import Prices
    from vericache_sglang.prefix_cache.segment import Tier


class Branches:
    """Costs and savings of all n segments, as arrays in one common order.

    Children come before their parents; segments that start at the same token are in
    order of insertion. Sums along branches are computed level by level, where a level
    is the segments that start at the same token: the number of steps is bounded by the
    longest prompt, not by the number of segments.

    Args:
        index: All segments; may change afterwards.
        tier: Tier that needs space; unpinned segments with a part there can be evicted.
        now: Time, in seconds.
        prices: Seconds that transfers and prefills take.

    Attributes:
        rows: [n] int64, rows of ``SegmentIndex.columns``, children first.
        first: Slice of the segments with the smallest start, the root segments unless
            all of those were dropped; the last slice.
        levels: Slices of the other segments, those deepest in prompts first.
        parents: [n] int64, position of each parent; ROOT or ABSENT (the last two
            positions of arrays of n + 2) without one.
        nbytes: [2, n] float64, bytes of residual KV and draft KV; 0: no such part.
        tier: [2, n] int64, tiers of the two parts.
        here: [2, n] bool, whether each part is in ``tier``.
        pinned: [n] bool, whether the segment is pinned.
        stored: [n] bool, whether the store has all of the segment.
        chance: [n] float64, chance of a use soon, in (0, 1].
        own_s: [n] float64, seconds that restoring the segment saves, times the chance;
            may be negative, and is -inf when a part of it is gone.
        below_s: [n + 2] float64, savings of the children at their present tiers, in
            seconds.
        kept_s: [n + 2] float64, the same for the children that cannot be evicted from
            the tier: pinned, or with no part there.
        pays: [n + 2] bool, whether a match reaches the segment and restoring it saves
            time.
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
        # One more element, for tier ``NOWHERE``.
        self._terms = [np.array([*each, 0.0]) for each in prices.by_tier]
        past = np.maximum(now - columns.last_use[rows], 0.0)
        uses = columns.uses[rows] * np.power(2.0, -past / index.half_life_s)
        self.chance = reuse_chance(self._most(uses))
        prefill_s = prices.prefill_s(start, columns.tokens[rows])
        self.own_s = self.chance * (prefill_s - self._restore_s())
        self.below_s, self.kept_s = np.zeros(count + 2), np.zeros(count + 2)
        self._weigh()
        self.savings_s = np.maximum(0.0, self.own_s + self.below_s[:count])
        self.pays = self._reached()

    def lost_s(self) -> np.ndarray:
        """Return [n] seconds lost by evicting each segment after its children, >= 0."""
        lost_s: np.ndarray = np.maximum(0.0, self.own_s + self.kept_s[:-2])
        return lost_s

    def _most(self, uses: np.ndarray) -> np.ndarray:
        """Return [n], the largest of ``uses`` over each segment and its descendants."""
        most = np.zeros(len(uses) + 2)
        for level in self.levels:
            np.maximum(uses[level], most[level], out=most[level])
            np.maximum.at(most, self.parents[level], most[level])
        np.maximum(uses[self.first], most[self.first], out=most[self.first])
        return most[: len(uses)]

    def _restore_s(self) -> np.ndarray:
        """Return [n] seconds to load each segment to the device, part by part."""
        seconds = np.zeros(len(self.rows))
        for kind in (0, 1):
            latency_s, rate = self._fetch_terms(kind, self.tier[kind])
            seconds = seconds + latency_s + rate * self.nbytes[kind]
        return seconds

    def slower_s(self, kind: int, lower: Tier) -> np.ndarray:
        """Return [n] seconds that loading a part from ``lower`` takes longer."""
        there_s, there = self._fetch_terms(kind, int(lower))
        here_s, here = self._fetch_terms(kind, self.tier[kind])
        longer_s: np.ndarray = there_s - here_s + (there - here) * self.nbytes[kind]
        return longer_s

    def _fetch_terms(
        self, kind: int, tier: np.ndarray | int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds, and seconds per byte, of loading a part; see ``by_tier``.

        Draft KV needs slots of the pool, and so does a segment that is not compressed.
        """
        latency_s, passing, staying = self._terms
        if kind:
            return latency_s[tier], staying[tier]
        return latency_s[tier], np.where(self._whole, staying[tier], passing[tier])

    def _weigh(self) -> None:
        """Sum the savings of the children of each segment."""
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
