"""Victims of random trees against the definitions written out, segment by segment."""

from math import exp, inf

import pytest
from forest import EXACT, HALF_LIFE_S, TIERS, after_of, apply, chain_of, forests, whole
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.prefix_cache.eviction import victims
from vericache_sglang.prefix_cache.index import SegmentIndex
from vericache_sglang.prefix_cache.segment import Part, Tier, Use

EVERYTHING = 1 << 60


class Plain:
    """The cost model by its definitions; every figure is computed anew when asked."""

    def __init__(self, index, tier, now):
        self.index, self.tier, self.now = index, tier, now
        self.order = {each.name: place for place, each in enumerate(index.segments())}

    def here(self, name):
        parts = self.index.get(name).content.parts
        return {part: held for part, held in parts if held.tier is self.tier}

    def uses(self, name):
        segment = self.index.get(name)
        own = segment.uses * 0.5 ** ((self.now - segment.last_use) / HALF_LIFE_S)
        return max([own, *map(self.uses, self.index.children(name))])

    def chance(self, name):
        return 1.0 - exp(-self.uses(name))

    def fetch(self, name, part, tier):
        content = self.index.get(name).content
        nbytes = content.held(part).nbytes
        if tier is Tier.DEVICE:
            return 0.0
        if tier is Tier.GONE:
            return inf
        seconds = nbytes / 1024
        if part is Part.DRAFT or content.draft is None:
            seconds += nbytes / 2048
        if tier is Tier.STORE:
            seconds += 0.125 + nbytes / 512
        return seconds

    def own(self, name):
        """Return what restoring the segment saves, times its chance."""
        segment = self.index.get(name)
        squares = segment.end**2 - segment.start**2
        saved = segment.content.tokens / 128 + squares / 2**20
        for part, held in segment.content.parts:
            saved -= self.fetch(name, part, held.tier)
        return self.chance(name) * saved

    def savings(self, name):
        return max(0.0, self.own(name) + sum(map(self.savings, self.children(name))))

    def children(self, name):
        return self.index.children(name)

    def pays(self, name):
        if name is None:
            return True
        segment = self.index.get(name)
        return (
            segment is not None and self.savings(name) > 0 and self.pays(segment.parent)
        )

    def stays(self, name):
        return self.index.get(name).users or not self.here(name)

    def loss_of_all(self, name):
        """Return what is lost with a segment once what leaves before it has left."""
        after = [child for child in self.children(name) if self.stays(child)]
        after = [child for child in after if self.savings(child) > 0]
        return max(0.0, self.own(name) + sum(map(self.loss_of_all, after)))

    def slower(self, name, part, lower):
        """Return how much longer a part takes that is further up from ``lower``."""
        tier = self.index.get(name).content.held(part).tier
        return self.fetch(name, part, lower) - self.fetch(name, part, tier)

    def choices(self, name):
        """Return (parts, target, loss) of what can leave the tier."""
        together = tuple(self.here(name))
        if not self.pays(name):
            return [(together, Tier.GONE, 0.0)]
        if self.tier is Tier.DEVICE:
            chance = self.chance(name)
            losses = [chance * self.slower(name, p, Tier.HOST) for p in together]
            if max(losses) < self.savings(name):
                return [
                    ((part,), Tier.HOST, loss)
                    for part, loss in zip(together, losses, strict=True)
                ]
        if self.tier < Tier.STORE and self.index.get(name).stored:
            moving = everything_of(self.index, name, together, Tier.STORE)
            slower = sum(self.slower(name, part, Tier.STORE) for part in moving)
            loss = self.chance(name) * slower
            if loss < self.savings(name):
                return [(together, Tier.STORE, loss)]
        return [(together, Tier.GONE, self.loss_of_all(name))]

    def ranked(self):
        """Return all choices by their keys; of equals the deepest first."""
        names = [each.name for each in self.index.segments()]
        choices = [(name, *choice) for name in names for choice in self.offers(name)]
        return sorted(choices, key=self.rank)

    def offers(self, name):
        if self.index.get(name).users or not self.here(name):
            return []
        return self.choices(name)

    def rank(self, choice):
        name, parts, *_ = choice
        start, order = self.index.get(name).start, self.order[name]
        return self.key(*choice), -start, order, parts[0] is Part.DRAFT

    def key(self, name, parts, target, loss):
        """Return the largest loss per byte of a choice and all that go before it."""
        keys = [loss / sum(self.here(name)[part].nbytes for part in parts)]
        kinds = set(parts) if target is Tier.HOST else set(Part)
        for other in after_of(self.index, name):
            if self.index.get(other).users and kinds & set(self.here(other)):
                return inf
            for choice in self.offers(other):
                if kinds & set(choice[0]):
                    keys.append(self.key(other, *choice))
        return max(keys)


@given(forests(), TIERS)
def test_moves_are_those_of_the_definitions_in_their_order(forest, tier):
    index, now = forest
    got = victims(index, tier, EVERYTHING, now, EXACT)
    want = [
        (name, part, target)
        for name, parts, target, _ in Plain(index, tier, now).ranked()
        for part in everything_of(index, name, parts, target)
    ]
    assert [(move.name, move.part, move.target) for move in got] == want
    losses = [loss for *_, loss in Plain(index, tier, now).ranked() if loss]
    assert [move.loss_s for move in got if move.loss_s] == pytest.approx(losses)


def everything_of(index, name, parts, target):
    if target is Tier.HOST:
        return parts
    parts = index.get(name).content.parts
    return [part for part, held in parts if held.tier < target]


@given(forests(), TIERS, st.integers(1, 20_000))
def test_enough_is_freed_and_no_move_more_than_needed(forest, tier, nbytes):
    index, now = forest
    moves = victims(index, tier, nbytes, now, EXACT)
    freed = [
        index.get(move.name).content.held(move.part).nbytes
        for move in moves
        if move.source is tier
    ]
    left = [
        part
        for segment in index.segments()
        if not segment.users
        for part, held in segment.content.parts
        if held.tier is tier
    ]
    assert len(left) == len(freed) or sum(freed) >= nbytes
    # A segment leaves as a whole, a part moves to the host alone.
    last = [
        index.get(move.name).content.held(move.part).nbytes
        for move in moves
        if move.source is tier and move.name == moves[-1].name
    ][-1 if moves and moves[-1].target is Tier.HOST else 0 :]
    assert not moves or sum(freed) - sum(last) < nbytes
    before = index.total(tier).nbytes
    apply(index, moves)
    index.check()
    assert index.total(tier).nbytes == before - sum(freed)


@given(forests(), TIERS, st.integers(1, 20_000))
def test_no_segment_leaves_while_one_that_follows_it_stays(forest, tier, nbytes):
    index, now = forest
    moves = victims(index, tier, nbytes, now, EXACT)
    moved = {(move.name, move.part) for move in moves}
    stranding = 0
    for move in moves:
        assert not index.get(move.name).users
        assert move.target > move.source
        if move.source is not tier:
            continue
        for name in after_of(index, move.name):
            for part, held in index.get(name).content.parts:
                bound = move.target is not Tier.HOST or part is move.part
                if held.tier is tier and bound and (name, part) not in moved:
                    stranding += 1
                    blocked = [name, *after_of(index, name)]
                    assert any(index.get(each).users for each in blocked)
    if stranding:
        # Nothing else was left: every part without a pinned one after it has gone.
        for segment in index.segments():
            pinned = [index.get(name).users for name in after_of(index, segment.name)]
            if not segment.users and not any(pinned):
                for part, held in segment.content.parts:
                    assert held.tier is not tier or (segment.name, part) in moved


def test_what_a_pinned_segment_follows_leaves_when_nothing_else_does():
    index = SegmentIndex(HALF_LIFE_S)
    names = chain_of(index, [whole(1024, Tier.HOST)] * 3, now=0.0)
    (hot,) = chain_of(index, [whole(1024, Tier.HOST)], now=100.0, name="hot")
    index.touch([hot] * 50, 100.0)
    index.hold("request", {names[2]: Use.NONE})
    moves = victims(index, Tier.HOST, EVERYTHING, 100.0, EXACT)
    assert [move.name for move in moves] == [hot, names[1], names[0]]


def test_a_stranded_segment_costs_nothing_and_goes_at_once():
    index = SegmentIndex(HALF_LIFE_S)
    names = chain_of(index, [whole(1024, Tier.DEVICE)] * 3)
    chain_of(index, [whole(1024, Tier.DEVICE)], name="cold", now=0.0)
    index.touch(names * 9, 50.0)
    index.drop(names[0], strand=True)
    moves = victims(index, Tier.DEVICE, 2048, 50.0, EXACT)
    assert [(move.name, move.target, move.loss_s) for move in moves] == [
        (names[2], Tier.GONE, 0.0),
        (names[1], Tier.GONE, 0.0),
    ]


def test_nothing_is_chosen_when_nothing_is_needed():
    index = SegmentIndex()
    assert victims(index, Tier.DEVICE, 1, 0.0, EXACT) == []
    chain_of(index, [whole(1024, Tier.DEVICE)])
    assert victims(index, Tier.DEVICE, 0, 0.0, EXACT) == []
    assert victims(index, Tier.HOST, 1, 0.0, EXACT) == []
    with pytest.raises(InvariantError, match="GONE"):
        victims(index, Tier.GONE, 1, 0.0, EXACT)
