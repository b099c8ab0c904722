"""Which parts leave a tier first: those whose absence costs least per byte freed.

The loss of a move is the chance of a use soon, times the seconds by which the move
makes restoring the segment slower; of letting a segment go, what its branch saves. Each
move is priced with every other part where it is now.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop
from math import inf
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError
from vericache_sglang.tiers.segment import Part, Tier
from vericache_sglang.tiers.worth import Branches

if TYPE_CHECKING:
    from vericache_sglang.tiers.index import SegmentIndex
    from vericache_sglang.tiers.prices import Prices
    from vericache_sglang.tiers.segment import Content

LOWER = {Tier.DEVICE: (Tier.HOST, Tier.STORE), Tier.HOST: (Tier.STORE,), Tier.STORE: ()}
"""Where a part may be kept when it has to leave a tier, the nearest first."""

KINDS = (Part.COMPLEMENT, Part.DRAFT)
"""Of two parts with the same loss per byte the complement leaves first."""


@dataclass(frozen=True, slots=True)
class Demotion:
    """One move downwards.

    Attributes:
        name: The segment.
        part: What of it.
        source: Where it is.
        target: Where it goes. The parts of a segment that goes GONE go together,
            wherever they are: one is of no use alone.
        loss_s: Seconds the move is expected to cost, >= 0; of a segment that goes GONE
            its first part has all of them.
    """

    name: str
    part: Part
    source: Tier
    target: Tier
    loss_s: float


def victims(
    index: SegmentIndex, tier: Tier, nbytes: int, now: float, prices: Prices
) -> list[Demotion]:
    """Choose what leaves ``tier`` so that ``nbytes`` of it become free.

    A part goes one tier down; further where restoring from there would be slower than
    computing the segment again, so that it would be kept in vain. Nothing is moved
    here: the caller moves bytes and records each move with ``SegmentIndex.place``.
    O(n log n) for n segments.

    Args:
        index: All segments.
        tier: Where room is needed; not GONE.
        nbytes: How much, in bytes.
        now: Time, in seconds of the clock the index was told.
        prices: What transfers and prefills take.

    Returns:
        Moves in order, the least loss per byte first, until enough is free; all
        unpinned parts of the tier where that is not enough. Of one kind of part, no
        segment goes before one that follows it; none goes GONE before any part that
        follows it; those with a pinned part after them in the tier come last.

    Raises:
        InvariantError: ``tier`` is GONE.
    """
    if tier is Tier.GONE:
        raise InvariantError("nothing can be freed in GONE")
    if nbytes <= 0:
        return []
    offers = _Offers(Branches(index, tier, now, prices), tier, prices)
    moves: list[Demotion] = []
    while nbytes > 0 and offers.left:
        freed, taken = offers.cheapest()
        moves += taken
        nbytes -= freed
    return moves


class _Offers:
    """Every move out of a tier, none cheaper than one that has to come before it."""

    def __init__(self, branches: Branches, tier: Tier, prices: Prices) -> None:
        self._branches = branches
        self._tier = tier
        self._steps = [(lower, *prices.slower(tier, lower)) for lower in LOWER[tier]]
        # Key, place, kind, target and loss in seconds. The key is the loss per byte
        # freed or that of a move which comes before; of equals what follows is first,
        # then the complement.
        self.left: list[tuple[float, int, int, Tier, float]] = []
        # By kind, the largest keys of the parts in the tier after each place.
        self._after = ([0.0] * len(branches.pays), [0.0] * len(branches.pays))
        self._fill()
        heapify(self.left)

    def cheapest(self) -> tuple[int, list[Demotion]]:
        """Take the cheapest offer.

        Returns:
            Bytes it frees in the tier, >= 1, and its moves.
        """
        _, place, kind, target, loss_s = heappop(self.left)
        segment = self._branches.segments[place]
        parts = segment.content.parts
        if target is Tier.GONE:
            moving = [each for each in parts if each[1].tier is not Tier.GONE]
        else:
            moving = [each for each in parts if each[0] is KINDS[kind]]
        freed = sum(held.nbytes for _, held in moving if held.tier is self._tier)
        return freed, [
            Demotion(segment.name, part, held.tier, target, 0.0 if number else loss_s)
            for number, (part, held) in enumerate(moving)
        ]

    def _fill(self) -> None:
        rests, drafts = self._after
        parents = self._branches.parents
        for place, segment in enumerate(self._branches.segments):
            if segment.content.is_in(self._tier):
                if segment.pins:
                    self._block(place, segment.content)
                else:
                    self._offer(place, segment.content)
            above = parents[place]
            if rests[place] > rests[above]:
                rests[above] = rests[place]
            if drafts[place] > drafts[above]:
                drafts[above] = drafts[place]

    def _block(self, place: int, content: Content) -> None:
        """Let what has a pinned part after it leave when nothing else is left."""
        for kind, part in enumerate(KINDS):
            held = content.held(part)
            if held is not None and held.tier is self._tier:
                self._after[kind][place] = inf

    def _offer(self, place: int, content: Content) -> None:
        """Offer the parts of an unpinned segment with one in the tier."""
        branches, tier = self._branches, self._tier
        rest, draft = content.complement, content.draft
        here = [(0, rest.nbytes, draft is None)] if rest.tier is tier else []
        if draft is not None and draft.tier is tier:
            here.append((1, draft.nbytes, True))
        if not branches.pays[place]:
            self._offer_all(place, here, 0.0)
            return
        worth_s, chance = branches.worth_s(place), branches.chance[place]
        found = []
        for kind, nbytes, stays in here:
            for lower, latency_s, rates in self._steps:
                loss_s = chance * (latency_s + rates[stays] * nbytes)
                # Else a match would not pay as far as here any more: kept in vain.
                if loss_s < worth_s:
                    found.append((loss_s / nbytes, kind, lower, loss_s))
                    break
            else:
                self._offer_all(place, here, branches.lost_s(place))
                return
        for key, kind, lower, loss_s in found:
            after = self._after[kind]
            after[place] = max(key, after[place])
            self.left.append((after[place], place, kind, lower, loss_s))

    def _offer_all(
        self, place: int, here: list[tuple[int, int, bool]], loss_s: float
    ) -> None:
        """Offer to let a segment go: whatever follows it, of either kind, is first."""
        freed = sum(nbytes for _, nbytes, _ in here)
        key = max(loss_s / freed, *(after[place] for after in self._after))
        for kind, _, _ in here:
            self._after[kind][place] = key
        self.left.append((key, place, here[0][0], Tier.GONE, loss_s))
