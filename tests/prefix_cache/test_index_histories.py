"""Random histories of an index against a dictionary; ten thousand steps in one run."""

from collections import Counter
from copy import deepcopy

import pytest
from forest import EXACT, TIERS, TOKENS, matched
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vericache_sglang.errors import InvariantError
from vericache_sglang.prefix_cache.eviction import victims
from vericache_sglang.prefix_cache.index import SegmentIndex, Total
from vericache_sglang.prefix_cache.segment import Content, Part, PlacedPart, Tier, Use

HALF_LIFE_S = 20.0
PATHS = st.text("01", min_size=1, max_size=5)
"""A prompt: each digit is a segment, so prompts with the same first digits share."""

SIZES = {"": (0, 2048), "keep": (512, 1536), "codec": (640, 999)}
"""Bytes of draft part and complement by compressor."""

RULES = (
    *("add", "split", "match", "touch", "pin", "unpin", "abort"),
    *("make room", "place", "store", "drop"),
)
STEPS = Counter()
"""Steps of the run in progress, by rule."""

MOVES = Counter()
"""Moves that made room, by target."""


def names_of(path):
    """Name every segment of a prompt by all digits up to it."""
    return [path[: end + 1] for end in range(len(path))]


class Plain(dict):
    """The same index as a dictionary of plain records; all sums are made anew."""

    def add(self, name, compressor, places, now):
        old = self.get(name)
        if old is None:
            self[name] = {"pins": 0, "uses": [now], "stored": False}
        else:
            old["uses"].append(now)
            tiers = [tier for _, tier in old["parts"].values()]
            here = Tier.GONE not in tiers and min(tiers) < Tier.STORE
            if old["pins"] or (old["compressor"] == compressor and here):
                return False
        sizes = zip(Part, SIZES[compressor], places, strict=True)
        self[name]["compressor"] = compressor
        self[name]["parts"] = {
            part: [nbytes, tier] for part, nbytes, tier in sizes if nbytes
        }
        return True

    def restorable(self, name):
        tiers = [tier for _, tier in self[name]["parts"].values()]
        return Tier.GONE not in tiers

    def match(self, names):
        found = 0
        while found < len(names) and names[found] in self:
            if not self.restorable(names[found]):
                break
            found += 1
        return found

    def place(self, name, part, tier):
        self[name]["parts"][part][1] = tier
        if {tier for _, tier in self[name]["parts"].values()} == {Tier.GONE}:
            del self[name]

    def children(self, name):
        return {each for each in self if each[:-1] == name}

    def totals(self):
        tokens, nbytes = Counter(), Counter()
        for record in self.values():
            sizes = [size for size, _ in record["parts"].values()]
            shares = [TOKENS]
            if len(sizes) == 2:
                shares = [TOKENS * sizes[0] // sum(sizes)]
                shares.append(TOKENS - shares[0])
            for (size, tier), share in zip(
                record["parts"].values(), shares, strict=True
            ):
                tokens[tier] += share
                nbytes[tier] += size
        return {tier: Total(tokens[tier], nbytes[tier]) for tier in Tier}


class Histories(RuleBasedStateMachine):
    """Requests come, pin what they match, add the rest and end; room is made."""

    def __init__(self):
        super().__init__()
        self.index = SegmentIndex(HALF_LIFE_S)
        self.plain = Plain()
        self.running, self.users = [], 0
        self.now = 0.0

    def step(self, name):
        STEPS[name] += 1
        self.now += 1.0

    def refused(self, call, *args, **kwargs):
        before = deepcopy(list(self.index.segments()))
        with pytest.raises(InvariantError):
            call(*args, **kwargs)
        assert list(self.index.segments()) == before

    def added(self, names, compressor, draft_tier, rest_tier):
        draft, rest = SIZES[compressor]
        content = Content(
            tokens=TOKENS,
            residual=PlacedPart(rest, rest_tier),
            draft=PlacedPart(draft, draft_tier) if draft else None,
            compressor=compressor,
        )
        for name in names:
            parent = name[:-1] or None
            if parent and parent not in self.plain and name not in self.plain:
                self.refused(self.index.add, name, parent, content, self.now)
                continue
            want = self.plain.add(name, compressor, (draft_tier, rest_tier), self.now)
            assert self.index.add(name, parent, content, self.now) is want
            self.note(name, compressor != "codec")

    @rule(path=PATHS, compressor=st.sampled_from(list(SIZES)), draft=TIERS, rest=TIERS)
    def add(self, path, compressor, draft, rest):
        self.step("add")
        self.added(names_of(path), compressor, draft, rest)

    @rule(path=PATHS, compressor=st.sampled_from(list(SIZES)), tier=TIERS)
    def split_a_prefix(self, path, compressor, tier):
        """Two prompts that share all but the last segment."""
        self.step("split")
        for last in "01":
            names = names_of(path + last)
            self.added(names, compressor, tier, tier)
            assert matched(self.index, names) == self.plain.match(names) > 0

    @rule(path=PATHS, start=st.integers(0, 5))
    def match(self, path, start):
        self.step("match")
        names = names_of(path)
        assert matched(self.index, names) == self.plain.match(names)
        assert matched(self.index, names, start) == self.plain.match(names[start:])

    @rule(path=PATHS)
    def touch(self, path):
        self.step("touch")
        names = names_of(path)
        if any(name not in self.plain for name in names):
            self.refused(self.index.touch, names, self.now)
        names = names[: self.plain.match(names)]
        self.index.touch(names, self.now)
        for name in names:
            self.plain[name]["uses"].append(self.now)

    @rule(path=PATHS)
    def pin(self, path):
        self.step("pin")
        if len(self.running) == 4:
            self.ended(0)
        names = names_of(path)
        names = names[: self.plain.match(names)]
        self.users += 1
        self.index.hold(self.users, dict.fromkeys(names, Use.ALL))
        for name in names:
            self.plain[name]["pins"] += 1
        self.running.append((self.users, names))

    @precondition(lambda self: self.running)
    @rule(turn=st.integers(0, 3))
    def unpin(self, turn):
        self.step("unpin")
        self.ended(turn % len(self.running))

    def ended(self, turn):
        user, names = self.running.pop(turn)
        assert self.index.release(user) == names
        for name in names:
            self.plain[name]["pins"] -= 1

    @rule(path=PATHS, compressor=st.sampled_from(list(SIZES)), tier=TIERS)
    def abort(self, path, compressor, tier):
        """A request ends before it has added anything that it may keep."""
        self.step("abort")
        names = names_of(path)
        new = [name for name in names if name not in self.plain]
        self.pin(path)
        matched = {name: self.index.get(name).content for name in self.running[-1][1]}
        self.added(names, compressor, tier, tier)
        assert {name: self.index.get(name).content for name in matched} == matched
        self.ended(-1)
        for name in reversed(new):
            if name in self.plain and not self.plain.children(name):
                self.index.drop(name)
                del self.plain[name]

    @precondition(lambda self: self.plain)
    @rule(tier=TIERS, share=st.integers(1, 8))
    def make_room(self, tier, share):
        self.step("make room")
        total = self.index.total(tier).nbytes
        need = total * share // 8
        pinned = {
            name: record["parts"]
            for name, record in self.plain.items()
            if record["pins"]
        }
        moves = victims(self.index, tier, need, self.now, EXACT)
        freed = 0
        for move in moves:
            nbytes, source = self.plain[move.name]["parts"][move.part]
            assert move.name not in pinned
            assert source is move.source < move.target
            freed += nbytes if source is tier else 0
            MOVES[move.target] += 1
            stored = self.plain[move.name]["stored"]
            assert stored or move.target is not Tier.STORE
            self.index.place(move.name, move.part, move.target)
            self.plain.place(move.name, move.part, move.target)
        held = sum(
            nbytes
            for parts in pinned.values()
            for nbytes, place in parts.values()
            if place is tier
        )
        assert freed >= min(need, total - held)
        assert self.index.total(tier).nbytes == total - freed

    @precondition(lambda self: self.plain)
    @rule(
        turn=st.integers(0, 61), part=st.sampled_from(Part), tier=st.sampled_from(Tier)
    )
    def place(self, turn, part, tier):
        self.step("place")
        name = list(self.plain)[turn % len(self.plain)]
        record = self.plain[name]
        source = record["parts"].get(part, [0, None])[1]
        stuck = record["pins"] or source is Tier.GONE
        if source is None or (source is not tier and stuck):
            self.refused(self.index.place, name, part, tier)
        else:
            self.index.place(name, part, tier)
            self.plain.place(name, part, tier)

    @precondition(lambda self: self.plain)
    @rule(turn=st.integers(0, 2), stored=st.booleans())
    def store(self, turn, stored):
        self.step("store")
        for name in list(self.plain)[turn::3]:
            self.note(name, stored)

    def note(self, name, stored):
        self.index.note_stored(name, stored)
        self.plain[name]["stored"] = stored

    @precondition(lambda self: self.plain)
    @rule(turn=st.integers(0, 61), strand=st.booleans())
    def drop(self, turn, strand):
        self.step("drop")
        name = list(self.plain)[turn % len(self.plain)]
        followed = self.plain.children(name) and not strand
        if self.plain[name]["pins"] or followed:
            self.refused(self.index.drop, name, strand=strand)
        else:
            self.index.drop(name, strand=strand)
            del self.plain[name]

    @invariant()
    def totals_balance(self):
        self.index.check()
        totals = {tier: self.index.total(tier) for tier in Tier}
        assert totals == self.plain.totals()
        assert sum(each.tokens for each in totals.values()) == TOKENS * len(self.plain)

    @invariant()
    def every_record_is_as_it_should_be(self):
        assert {each.name for each in self.index.segments()} == set(self.plain)
        for name, record in self.plain.items():
            segment = self.index.get(name)
            parts = {
                part: [held.nbytes, held.tier] for part, held in segment.content.parts
            }
            assert parts == record["parts"]
            assert segment.content.compressor == record["compressor"]
            assert len(segment.users) == record["pins"]
            assert segment.stored == record["stored"]
            assert segment.start == TOKENS * (len(name) - 1)
            assert segment.last_use == record["uses"][-1]

    def teardown(self):
        for name, record in self.plain.items():
            uses = self.index.get(name).uses_at(self.now, HALF_LIFE_S)
            want = sum(
                0.5 ** ((self.now - each) / HALF_LIFE_S) for each in record["uses"]
            )
            assert uses == pytest.approx(want)
            assert set(self.index.children(name)) == self.plain.children(name)


def test_random_steps_agree_with_a_dictionary():
    STEPS.clear()
    MOVES.clear()
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=20,
            stateful_step_count=200,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert STEPS.total() >= 3_000
    assert min(STEPS[rule] for rule in RULES) > 3
    assert min(MOVES[tier] for tier in Tier if tier) > 3
