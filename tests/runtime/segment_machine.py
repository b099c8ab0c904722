"""A random user of cached segments, and the dictionary it compares them with."""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from segment_world import KEPT, SHORT, SegmentWorld, attach_store, fetched, tiers_of

from vericache_sglang.compression.budget import Budget
from vericache_sglang.prefix_cache.segment import Form, Tier, Use

SLOTS = 96


def named(text):
    """Names of a text's segments; equal for equal beginnings."""
    return [text[: i + 1] for i in range(len(text))]


class SegmentMachine(RuleBasedStateMachine):
    """A tree that registers, evicts and restores, and requests that split and share.

    Attributes:
        tree: By name, the slots in which the tree has a segment.
        listing: By request, the segments whose draft parts it lists.
        referring: By request, those whose complements it refers to.
        damaged: Segments whose host copy had a bit flipped and may be there still.
    """

    def __init__(self):
        super().__init__()
        self.world = SegmentWorld(SLOTS, host=12 << 10)
        self.segments = self.world.segments
        self.store = attach_store(self.segments)
        self.segments.kept = KEPT
        self.tree, self.listing, self.referring = {}, {}, {}
        self.seen, self.damaged, self.requests = set(), set(), 0

    texts = st.text("pq", min_size=1, max_size=4)
    numbers = st.integers(0, 99)

    def in_tree(self, names):
        """Count the first segments of a text that the tree has."""
        return next((i for i, n in enumerate(names) if n not in self.tree), len(names))

    def enter(self, names, fresh):
        """Have the tree take a text over whose last slots are new."""
        count = self.in_tree(names)
        for at, name in enumerate(names[count:]):
            self.tree[name] = fresh[at * SHORT : (at + 1) * SHORT]
        slots = torch.cat([self.tree[name] for name in names])
        self.segments.register(names, slots)
        self.seen |= set(names)

    @rule(text=texts)
    def prefill(self, text):
        """Compute what the tree lacks of a text."""
        names = named(text)
        missing = names[self.in_tree(names) :]
        fresh = self.world.write_text(missing) if missing else torch.tensor([])
        if fresh is not None:
            self.enter(names, fresh.long())

    @rule(text=texts, number=numbers)
    def evict(self, text, number):
        """The tree gives a segment up, and first all that follow it."""
        going = sorted((n for n in self.tree if n.startswith(text)), key=len)[::-1]
        for name in going:
            slots = self.tree.pop(name)
            self.segments.leaving(slots[: 1 + number % SHORT])
            self.world.give(slots)

    @rule(text=texts)
    def restore(self, text):
        """Bring back what the tree lacks of a text, as far as that goes."""
        names = named(text)
        start = self.in_tree(names) * SHORT
        stop = self.segments.reach(names, start)
        assert start <= stop <= len(names) * SHORT
        for name in names[start // SHORT : stop // SHORT]:
            assert self.world.index.find(name).restorable
        fresh = self.world.take(stop - start) if stop > start else None
        if fresh is None:
            return
        with self.segments.kept_back(names[start // SHORT :]):
            bad = self.segments.restore(names[: stop // SHORT], start, fresh)
        for at, name in enumerate(names[start // SHORT : stop // SHORT]):
            own = fresh[at * SHORT : (at + 1) * SHORT]
            noted = torch.stack(self.world.scores.noted(own))
            unknown = bool(noted.isnan().all())
            assert bad or unknown or torch.equal(noted, self.world.truth_scores(name))
        if bad:
            assert set(bad) <= self.damaged, "an intact segment is not restored"
            self.world.give(fresh)
            for name in bad:
                self.segments.forget(name)
            assert self.segments.reach(bad, 0) == 0
            return
        self.enter(names[: stop // SHORT], fresh)

    @rule(text=texts, residuals=st.booleans())
    def split(self, text, residuals):
        """A request of a text lists shared draft parts, and maybe their complements."""
        names, world = named(text), self.world
        if self.in_tree(names) < len(names) or self.damaged & set(names):
            return
        parts = {n: world.draft(n) for n in names if world.segments.draft(n) is None}
        drafts = [part for part in parts.values() if part is not None]
        with self.segments.kept_back(names):
            rests = [
                n for n in names if residuals and world.segments.residual(n) is None
            ]
            opened = {}
            if len(drafts) == len(parts):
                opened = self.segments.open_residuals(rests, Budget(SHORT, KEPT, 0, 0))
            if len(drafts) < len(parts) or opened is None:
                for part in drafts:
                    world.give(part.slots)
                return
            for name, residual in opened.items():
                world.fill(name, residual)
                self.segments.save_scores(name, world.truth_scores(name))
            for name, part in parts.items():
                self.segments.add_draft(name, part)
        self.requests += 1
        rid = f"r{self.requests}"
        self.segments.settle(names)
        self.segments.use(rid, names)
        self.listing[rid] = names
        if residuals:
            self.segments.refer(rid, names)
            self.referring[rid] = names

    @precondition(lambda self: self.listing or self.referring)
    @rule(
        number=numbers,
        how=st.sampled_from(["stop_listing", "stop_referring", "release"]),
    )
    def part(self, number, how):
        """A request is parked, pinned or ends."""
        rids = sorted({*self.listing, *self.referring})
        rid = rids[number % len(rids)]
        getattr(self.segments, how)(rid)
        if how != "stop_referring":
            self.listing.pop(rid, None)
        if how != "stop_listing":
            self.referring.pop(rid, None)

    @rule(text=texts, number=numbers)
    def finish(self, text, number):
        """A request that drafted leaves what it said, as far as it fills segments."""
        names = named(text)
        first = number % (len(names) + 1)
        slots = self.world.write_text(names[first:]) if names[first:] else None
        if slots is not None:
            self.segments.keep(names, first, slots)
            self.world.give(slots)
            self.seen |= set(names)

    @rule(nbytes=st.integers(1, 6000))
    def make_room(self, nbytes):
        self.segments.make_room(nbytes)

    @rule()
    def take_all_the_room(self):
        """What is said to be evictable is what can be freed."""
        used, pending_max = (
            self.world.page_pool.used_bytes,
            self.segments.evictable_bytes,
        )
        self.segments.make_room(10**9)
        assert used - self.world.page_pool.used_bytes == pending_max
        assert self.segments.evictable_bytes == 0

    @rule()
    def announce(self):
        """The store has taken all that was written."""
        self.store.announce()

    @rule(text=texts)
    def fetch(self, text):
        """A request waits for what the store has of its prompt."""
        names = named(text)
        there = self.segments.reach(names, self.in_tree(names) * SHORT)
        self.segments.stored.fetch("waits", names, there)
        if self.store.reads:
            self.store.arrive()
            assert fetched(self.segments, "waits")
        tokens, start = self.segments.stored.pop("waits")
        assert tokens == 0 or start == there // SHORT * SHORT
        assert self.segments.reach(names, there) >= there + tokens - SHORT

    @precondition(lambda self: self.store.names)
    @rule(number=numbers)
    def lose(self, number):
        """The store gives a segment up."""
        self.store.announce()
        self.store.lose(self.store.names[number % len(self.store.names)])

    @rule(slots=st.integers(1, 30))
    def evict_drafts(self, slots):
        idle, free = self.segments.idle_slots, len(self.world.free)
        freed = self.segments.evict_drafts(slots)
        assert freed >= min(slots, idle)
        assert len(self.world.free) - free >= freed

    @rule(text=texts)
    def forget(self, text):
        self.segments.forget(text)
        self.damaged = {n for n in self.damaged if self.on_host(n)}

    @rule(text=texts)
    def damage(self, text):
        if text not in self.damaged and self.on_host(text):
            self.world.damage(text)
            self.damaged.add(text)

    @precondition(lambda self: not self.listing and not self.referring)
    @rule()
    def clear(self):
        """SGLang takes every slot back, and all is forgotten."""
        self.segments.clear()
        self.world.free = set(range(SLOTS))
        self.tree, self.damaged = {}, set()
        assert self.world.page_pool.used_bytes == 0
        assert self.segments.report()["cache_segments"] == 0

    def on_host(self, name):
        segment = self.world.index.find(name)
        return any(segment.has(f) for f in (Form.WHOLE, Form.DRAFT, Form.RESIDUAL))

    @invariant()
    def nothing_leaks(self):
        world = self.world
        self.segments.check()
        world.page_pool.check()
        assert world.page_pool.used_bytes == world.copies.held_bytes
        found = {name: world.index.find(name) for name in self.seen}
        assert world.copies.held_bytes == sum(s.host_bytes for s in found.values())
        parts = {n: s.draft for n, s in found.items() if s.draft is not None}
        owned = [slot for part in parts.values() for slot in part.slots.tolist()]
        owned += [slot for slots in self.tree.values() for slot in slots.tolist()]
        assert sorted([*owned, *world.free]) == list(range(SLOTS))
        for use, held in ((Use.DRAFT, self.listing), (Use.RESIDUAL, self.referring)):
            for name, segment in found.items():
                users = {rid for rid, each in segment.users.items() if each & use}
                assert users == {rid for rid, names in held.items() if name in names}

    @invariant()
    def every_bit_is_in_place(self):
        world = self.world
        for name, slots in self.tree.items():
            assert torch.equal(world.at(slots), world.truth(name))
        self.damaged = {n for n in self.damaged if self.on_host(n)}
        for name in self.seen:
            part = world.segments.draft(name)
            if part is not None:
                found = world.at(part.slots)
                assert torch.equal(found, world.of(name, world.kept(name)))
            if name in self.damaged:
                continue
            self.whole_on_host(name)

    def whole_on_host(self, name):
        """What the host has is the truth."""
        world = self.world
        rest = world.segments.residual(name)
        if rest is not None:
            both = (rest.keys.view(world.bits), rest.values.view(world.bits))
            wanted = world.of(name, world.away(name))
            assert torch.equal(torch.stack(both, 1), wanted)
        for form in (Form.WHOLE, Form.DRAFT):
            copy = world.copies.images_of(name, form)
            if copy is not None:
                both = [copy[f].read().view(world.bits) for f in ("keys", "values")]
                wanted = world.truth(name)
                if form is Form.DRAFT:
                    wanted = world.of(name, world.kept(name))
                assert torch.equal(torch.stack(both, 1), wanted)

    @invariant()
    def what_nobody_holds_is_found(self):
        """Who needs room on the host finds all that may go."""
        world = self.world
        referred = {name for names in self.referring.values() for name in names}
        for name in self.seen:
            rest = world.segments.residual(name) is not None
            pending_max = rest and name not in referred
            if pending_max or world.index.find(name).has(Form.WHOLE):
                known = self.segments._index.get(name)
                assert known is not None
                assert Tier.HOST in tiers_of(known)

    def teardown(self):
        for rid in sorted({*self.listing, *self.referring}):
            self.segments.release(rid)
        self.segments.make_room(10**9)
        assert self.world.page_pool.used_bytes == 0
        assert self.segments.evictable_bytes == 0
        self.segments.evict_drafts(SLOTS)
        assert self.world.index.drafts() == []
