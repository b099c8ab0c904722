"""Eviction order of a tier: least expected loss of time per byte freed first.

The loss of a demotion is the chance of a use soon, times the seconds by which the
demotion slows down restoring the segment; the loss of dropping a segment is the savings
of its branch. Each move is priced with all other parts at their present tiers.

Host eviction prefers segments that the store also holds, which cost a fetch rather than
a prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from vericache_sglang.errors import InvariantError
from vericache_sglang.prefix_cache.savings import Branches
from vericache_sglang.prefix_cache.segment import Part, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vericache_sglang.prefix_cache.index import SegmentIndex
    from vericache_sglang.prefix_cache.restore_costs import Prices

KINDS = (Part.RESIDUAL, Part.DRAFT)
"""Parts by index; of two with the same loss per byte, residual KV is evicted first."""

_FIRST = 64
"""Candidates sorted in the first step: few of many are used."""


@dataclass(frozen=True, slots=True)
class Demotion:
    """Move of one part to a lower tier.

    Attributes:
        part: The part that moves.
        source: Its present tier.
        target: Its next tier. Both parts of a segment move to STORE or GONE together,
            whatever their tiers: one is useless alone.
        loss_s: Expected cost of the move in seconds, >= 0; of two parts that move
            together, the first carries all of it.
    """

    name: str
    part: Part
    source: Tier
    target: Tier
    loss_s: float


def victims(
    index: SegmentIndex, tier: Tier, nbytes: int, now: float, prices: Prices
) -> list[Demotion]:
    """Choose the parts to evict from ``tier`` so that ``nbytes`` of it become free.

    Parts on the device move to the host, if restoring them from there is faster than
    recomputing the segment. Otherwise, and always from the host, a segment moves to the
    store if the store has it already and restoring from there is faster than
    recomputing; else it is dropped (GONE). Nothing is moved here: the caller moves the
    bytes and records each move with ``SegmentIndex.place``.

    Args:
        index: All segments.
        tier: Tier that needs space; not GONE.
        nbytes: Bytes to free.
        now: Time, in seconds of the index's clock.
        prices: Seconds that transfers and prefills take.

    Returns:
        Moves in order, the least loss per byte first, until enough is free; all
        unpinned parts of the tier if that is not enough. No part moves before the same
        part of a descendant; no segment leaves for STORE or GONE before any part of a
        descendant in the tier; ancestors of pinned parts in the tier come last.

    Raises:
        InvariantError: ``tier`` is GONE.
    """
    moves: list[Demotion] = []
    if nbytes > 0:
        for freed, taken in ranked(index, tier, now, prices):
            moves += taken
            nbytes -= freed
            if nbytes <= 0:
                break
    return moves


def ranked(
    index: SegmentIndex, tier: Tier, now: float, prices: Prices
) -> Iterator[tuple[int, list[Demotion]]]:
    """Yield the evictable parts of ``tier`` in the order of ``victims``, lazily.

    Changes of the index meanwhile do not affect the order.

    Args:
        index: All segments.
        tier: Tier that needs space; not GONE.
        now: Time, in seconds of the index's clock.
        prices: Seconds that transfers and prefills take.

    Yields:
        Bytes freed in the tier, >= 1, and the moves that free them.

    Raises:
        InvariantError: ``tier`` is GONE.
    """
    if tier is Tier.GONE:
        raise InvariantError("nothing can be freed in GONE")
    if not len(index):
        return
    names = list(index.columns.names)
    # The difference of infinite costs, of a missing link or store, is NaN.
    with np.errstate(invalid="ignore"):
        offers = _Offers(Branches(index, tier, now, prices), tier)
    for place, kind in offers.in_order():
        freed, moves = offers.moves(place, kind, names)
        yield freed, moves


class _Offers:
    """Candidate moves out of a tier, ordered so that descendants move first.

    A candidate is a single part, or a segment with all of its parts.
    """

    def __init__(self, branches: Branches, tier: Tier) -> None:
        self._branches = branches
        count = len(branches.rows)
        open_ = branches.here & ~branches.pinned
        self._alone = np.zeros((2, count), np.bool_)
        self._loss_s = np.zeros((2, count))
        self._target = np.full(count, int(Tier.GONE))
        pays = branches.pays[:count]
        if tier is Tier.DEVICE:
            slower_s = np.stack([branches.slower_s(kind, Tier.HOST) for kind in (0, 1)])
            loss_s = branches.chance * slower_s
            # Otherwise restoring up to this segment costs more than a prefill.
            fits = (loss_s < branches.savings_s) | ~open_
            self._alone = open_ & (pays & fits.all(0))
            self._loss_s = np.where(self._alone, loss_s, 0.0)
        self._joint = open_.any(0) & ~self._alone.any(0)
        lost_s = np.where(pays, branches.lost_s(), 0.0)
        stored = self._joint & branches.stored & pays
        if tier < Tier.STORE and stored.any():
            stored_s = np.zeros(count)
            for kind in (0, 1):
                moves = branches.tier[kind] < Tier.STORE
                slower_s = branches.slower_s(kind, Tier.STORE)
                stored_s = stored_s + np.where(moves, slower_s, 0.0)
            stored_s = branches.chance * stored_s
            stored &= stored_s < branches.savings_s
            self._target[stored] = Tier.STORE
            lost_s = np.where(stored, stored_s, lost_s)
        self._loss_s[0, self._joint] = lost_s[self._joint]
        nbytes = np.where(branches.here, branches.nbytes, 0.0)
        self._keys = self._apart(nbytes) if self._alone.any() else self._as_one(nbytes)

    def _as_one(self, nbytes: np.ndarray) -> np.ndarray:
        """Return the sort keys [n] of moves of whole segments; NaN without a move.

        A key is the largest loss per byte freed among the segment and its descendants;
        inf above pinned ones.

        Args:
            nbytes: [2, n] bytes in the tier.
        """
        branches, joint = self._branches, self._joint
        count = len(joint)
        # The largest keys of the descendants; once a level is done, its own keys too.
        after, own = np.zeros(count + 2), np.zeros(count)
        own[joint] = self._loss_s[0, joint] / nbytes[:, joint].sum(0)
        own[branches.here.any(0) & branches.pinned] = inf
        for level in branches.levels:
            key = after[level]
            np.maximum(key, own[level], out=key)
            np.maximum.at(after, branches.parents[level], key)
        keys = np.maximum(after[:count], own)
        return np.where(joint, keys, np.nan)

    def _apart(self, nbytes: np.ndarray) -> np.ndarray:
        """Return the sort keys [2n] of moves of single parts, by position and kind.

        The key of a segment that moves as a whole is at kind 0; see ``_as_one``.

        Args:
            nbytes: [2, n] bytes in the tier.
        """
        branches, joint, alone = self._branches, self._joint, self._alone
        count = len(joint)
        per_byte, of_both = np.zeros((2, count)), np.zeros(count)
        per_byte[alone] = self._loss_s[alone] / nbytes[alone]
        per_byte[branches.here & branches.pinned] = inf
        of_both[joint] = self._loss_s[0, joint] / nbytes[:, joint].sum(0)
        after = np.zeros((2, count + 2))
        both = joint & branches.here
        for level in (*branches.levels, branches.first):
            own = after[:, level]
            np.maximum(own, per_byte[:, level], out=own)
            if joint[level].any():
                key = np.maximum(np.maximum(own[0], own[1]), of_both[level])
                np.copyto(own, key, where=both[:, level])
            for kind in (0, 1):
                np.maximum.at(after[kind], branches.parents[level], own[kind])
        keys = np.where(alone, after[:, :count], np.nan)
        keys[0, joint] = np.where(both[0], after[0, :count], after[1, :count])[joint]
        return keys.T.reshape(-1)

    def in_order(self) -> Iterator[tuple[int, int]]:
        """Yield position and kind of the moves, the smallest key first.

        Among equals, descendants come first, then residual KV.
        """
        kinds = len(self._keys) // len(self._joint)
        offers = np.flatnonzero(~np.isnan(self._keys))
        keys, few = self._keys[offers], _FIRST
        while len(offers):
            chosen = np.ones(len(keys), np.bool_)
            if few < len(keys):
                chosen = keys <= np.partition(keys, few)[few]
            some = offers[chosen][np.argsort(keys[chosen], kind="stable")]
            for offer in some.tolist():
                yield offer // kinds, offer % kinds
            offers, keys, few = offers[~chosen], keys[~chosen], 4 * few

    def moves(
        self, place: int, kind: int, names: list[str]
    ) -> tuple[int, list[Demotion]]:
        """Return the bytes that a candidate frees in the tier, and its moves."""
        branches = self._branches
        tiers = branches.tier[:, place].tolist()
        if self._joint[place]:
            target = Tier(int(self._target[place]))
            moving = [each for each in (0, 1) if tiers[each] < target]
        else:
            target, moving = Tier.HOST, [kind]
        name, loss_s = names[branches.rows[place]], float(self._loss_s[kind, place])
        here, nbytes = branches.here[:, place], branches.nbytes[:, place]
        freed = sum(int(nbytes[each]) for each in moving if here[each])
        return freed, [
            Demotion(
                name, KINDS[each], Tier(tiers[each]), target, 0.0 if number else loss_s
            )
            for number, each in enumerate(moving)
        ]
