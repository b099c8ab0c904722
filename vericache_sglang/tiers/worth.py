"""What a segment and those that follow it save, priced from the ends of the branches.

A segment is of no use without those before it, and it is used whenever one that follows
it is. Hence, with the chance of the most used segment of the branch,

    worth = max(0, chance * (prefill - restore) + worth of what follows directly)

is what the branch saves, in seconds: a match goes as far as that pays.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from vericache_sglang.tiers.prices import reuse_chance

if TYPE_CHECKING:
    from vericache_sglang.tiers.index import SegmentIndex
    from vericache_sglang.tiers.prices import Prices
    from vericache_sglang.tiers.segment import Tier


ROOT = -1
"""Place before the first segment of a prompt."""

ABSENT = -2
"""Place of a segment that others follow, but that is not in the index."""


class Branches:
    """Every segment with those that follow it; one list per figure, by the same places.

    Segments are listed children first, of equals the one longest in the index first.
    Lists instead of objects: ten thousand segments take tens of milliseconds.

    Args:
        index: All segments.
        tier: Where room is needed: unpinned segments with a part there may leave.
        now: Time, in seconds.
        prices: What transfers and prefills take.

    Attributes:
        segments: All segments, children first.
        parents: Place of the one before each; ROOT or ABSENT where there is none.
        chance: Of a use soon, in (0, 1].
        own_s: Seconds that restoring the segment saves, times the chance; may be
            negative, and is -inf when a part of it is gone.
        below_s: Worth of what follows, in seconds, at the places it has now.
        kept_s: The same without what has to leave the tier before the segment does.
        pays: Whether a match gets to the segment and restoring it pays.
    """

    def __init__(
        self, index: SegmentIndex, tier: Tier, now: float, prices: Prices
    ) -> None:
        # A segment starts where the one before it ends.
        self.segments = sorted(index.segments(), key=attrgetter("start"), reverse=True)
        places = {segment.name: place for place, segment in enumerate(self.segments)}
        self.parents = [
            ROOT if segment.parent is None else places.get(segment.parent, ABSENT)
            for segment in self.segments
        ]
        # Two places more: what is summed up for ROOT and ABSENT ends there.
        ends = len(places) + 2
        self.chance = [0.0] * ends
        self.own_s = [0.0] * ends
        self.below_s = [0.0] * ends
        self.kept_s = [0.0] * ends
        self.pays = [False] * ends
        self._weigh(tier, now, index.half_life_s, prices)
        self._reach()

    def worth_s(self, place: int) -> float:
        """Return the seconds a branch saves where it is, >= 0."""
        return max(0.0, self.own_s[place] + self.below_s[place])

    def lost_s(self, place: int) -> float:
        """Return the seconds lost if a segment goes when its turn comes, >= 0."""
        return max(0.0, self.own_s[place] + self.kept_s[place])

    def _weigh(
        self, tier: Tier, now: float, half_life_s: float, prices: Prices
    ) -> None:
        below_s, kept_s = self.below_s, self.kept_s
        most = [0.0] * len(below_s)
        for place, segment in enumerate(self.segments):
            above = self.parents[place]
            uses = segment.uses_at(now, half_life_s)
            if uses < most[place]:
                uses = most[place]
            if uses > most[above]:
                most[above] = uses
            self.chance[place] = chance = reuse_chance(uses)
            self.own_s[place] = own_s = chance * prices.gain_s(segment)
            worth_s = own_s + below_s[place]
            if worth_s > 0:
                below_s[above] += worth_s
                if segment.pins or not segment.content.is_in(tier):
                    kept_s[above] += self.lost_s(place)

    def _reach(self) -> None:
        self.pays[ROOT] = True
        for place in range(len(self.segments) - 1, -1, -1):
            worth_s = self.own_s[place] + self.below_s[place]
            self.pays[place] = worth_s > 0 and self.pays[self.parents[place]]
