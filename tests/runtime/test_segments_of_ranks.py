"""Ranks that know different things cache the same segments; real gloo, forked ranks."""

from collections import deque
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch
from forked_ranks import Ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_machine import named
from segment_world import (
    IDENTITY,
    KEPT,
    MODULES,
    SHORT,
    Alone,
    SegmentWorld,
    attach_store,
)

from vericache_sglang.compression.budget import Budget
from vericache_sglang.errors import RankError
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.prefix_cache import cached_segments, segment_slots, segment_tiers
from vericache_sglang.prefix_cache import ranks as one_rank
from vericache_sglang.prefix_cache.segment import Form
from vericache_sglang.runtime.tp_cache import TensorParallelCache
from vericache_sglang.runtime.tp_sync import TensorParallelSync
from vericache_sglang.scheduling.estimates import Estimates

pytestmark = pytest.mark.sglang

TEXTS = ["p", "pq", "pqp", "pqpp", "pp", "q", "qq", "qpq", "qpqp"]
SLOTS = 96


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    three = Ranks(3, tmp_path_factory.mktemp("ranks"))
    yield three
    three.close()


class RankWorld(SegmentWorld):
    """One rank's segments, whose bad luck is its own.

    Attributes:
        log: What was decided, in order, the same on all ranks.
    """

    nans = False

    def __init__(self, group, rank, seed, listens):
        for module in (cached_segments, segment_slots, segment_tiers):
            assert module.__name__.rpartition(".")[2] in MODULES
            module.SEGMENT = SHORT
        self.own = Random(1000 * seed + rank)
        self.clock = SimpleNamespace(now=self.own.uniform(0, 1e4))
        one_rank.time = SimpleNamespace(monotonic=lambda: self.clock.now)
        host = ((6, 11)[seed % 2] + self.own.randrange(4)) << 10
        self.sync = TensorParallelSync(Estimates(), group if listens else None)
        self.ranks = Alone()
        super().__init__(SLOTS, host, ranks=Deferred())
        if listens:
            self.ranks = TensorParallelCache(self.sync, self.page_pool)
        self.segments._ranks.ranks = self.ranks
        own = replace(IDENTITY.model, tp_rank=rank, tp_size=3)
        self.store = attach_store(self.segments, fingerprint=own)
        self.segments.stored.alone = self.ranks.alone
        self.segments.kept = KEPT
        self.segments.active = True
        self.tree, self.requests, self.log = {}, deque(), []
        self.waits, self.held = {}, []

    def begin(self):
        """Begin an iteration: time passes, copies end, bits flip, the ranks meet."""
        own, stored = self.own, self.segments.stored
        self.clock.now += own.uniform(0, 300)
        for _ in range(own.randrange(3)):
            if self.store._writer.jobs:
                self.store.storage.fault = "set" if own.random() < 0.2 else None
                self.store._writer.run()
        self.store.storage.fault = None
        while self.store.reads and own.random() < 0.7:
            self.store.arrive()
        if own.random() < 0.1 and self.store.names:
            self.store.lose(own.choice(self.store.names))
        if own.random() < 0.3:
            self.release()
        segments = self.index.segments()
        images = [image for each in segments for image in each.images.values()]
        if images and own.random() < 0.3:
            next(iter(own.choice(images).tensors.values())).raw(0)[0][0] ^= 1
        if images and own.random() < 0.3:  # a copy uses its pages for longer
            pages = own.choice(images).pages
            pages.hold()
            self.held.append(pages)
        if not self.ranks.alone:
            assert not self.sync.sync_errors(False, self.ranks.tell(stored))
            self.ranks.receive(self.sync.told, stored)

    def release(self):
        while self.held:
            self.held.pop().release()

    def enter(self, names, slots):
        for at, name in enumerate(names):
            self.tree.setdefault(name, slots[at * SHORT : (at + 1) * SHORT])
        every = torch.cat([self.tree[name] for name in names])
        self.segments.register(names, every)

    def missing(self, names):
        """Return the first segment of a prompt that is not in the tree."""
        return next((i for i, n in enumerate(names) if n not in self.tree), len(names))

    def evict(self, text):
        going = sorted((n for n in self.tree if n.startswith(text)), key=len)[::-1]
        for name in going:
            slots = self.tree.pop(name)
            self.segments.leaving(slots)
            self.give(slots)

    def prefill(self, text):
        names = named(text)
        begin = self.missing(names)
        stop = self.segments.reach(names, begin * SHORT)
        self.log.append(("match", text, begin, stop))
        if stop > begin * SHORT:
            self.restore(names, begin, stop // SHORT)
        begin = self.missing(names)
        if begin < len(names):
            slots = self.write_text(names[begin:])
            if slots is None:
                self.evict("")
                return
            for at, name in enumerate(names[begin:]):
                self.tree[name] = slots[at * SHORT : (at + 1) * SHORT]
        self.enter(names, torch.empty(0, dtype=torch.int64))

    def restore(self, names, begin, stop):
        slots = self.take((stop - begin) * SHORT)
        if slots is None:
            return
        with self.segments.kept_back(names[begin:]):
            bad = self.segments.restore(names[:stop], begin * SHORT, slots)
        for name in bad:
            self.segments.forget(name)
        self.log.append(("restored", stop, bad))
        if bad:
            self.give(slots)
            return
        for at, name in enumerate(names[begin:stop]):
            self.tree[name] = slots[at * SHORT : (at + 1) * SHORT]
            assert torch.equal(self.at(self.tree[name]), self.truth(name))

    def compress(self, text):
        names, segments = named(text), self.segments
        if self.missing(names) < len(names) or not segments.trusts(names):
            return
        parts = {n: self.draft(n) for n in names if segments.draft(n) is None}
        opened = None
        with segments.kept_back(names):
            rests = [n for n in names if segments.residual(n) is None]
            if None not in parts.values():
                opened = segments.open_residuals(rests, Budget(SHORT, KEPT, 0, 0))
            self.log.append(("compressed", text, opened is not None))
            for name, residual in (opened or {}).items():
                self.fill(name, residual)
            for name, part in parts.items():
                if opened is not None:
                    segments.add_draft(name, part)
                elif part is not None:
                    self.give(part.slots)
        if opened is None:
            return
        segments.settle(names)
        rid = f"r{len(self.log)}"
        segments.use(rid, names)
        segments.refer(rid, names)
        self.requests.append(rid)

    def end(self, text):
        if self.requests:
            self.segments.release(self.requests.popleft())

    def wait(self, text):
        """Have a request wait for what the store has of its prompt."""
        rid, names = f"w{len(self.log)}", named(text)
        there = self.segments.reach(names, self.missing(names) * SHORT)
        self.segments.stored.fetch(rid, names, there)
        self.waits[rid] = text

    def ask(self, text):
        """Ask for every waiting request whether it has waited long enough."""
        stored = self.segments.stored
        for rid in list(self.waits):
            found = stored.found(rid)
            if found is not None and stored.take(rid, found):
                self.log.append(("fetched", rid, found, stored.pop(rid)))
                del self.waits[rid]

    def make_room(self, text):
        self.segments.make_room(900 * len(text))

    def evict_drafts(self, text):
        self.log.append(self.segments.evict_drafts(2 * len(text)))

    def summary(self):
        """Return all that eviction and matches depend on."""
        self.segments.check()
        return [
            (
                *(each.name, each.parent, each.start, each.content, each.last_use),
                *(each.uses, each.stored, each.distrusted, len(each.users)),
                each.draft is not None,
                sorted(form for form in each.images if form is not Form.SCORES),
            )
            for each in self.index.segments()
        ]


class Deferred:
    """Ranks that are set later, as they need the host memory of the world."""

    def __getattr__(self, name):
        return getattr(self.__dict__["ranks"], name)


STEPS = (
    *[RankWorld.prefill] * 4,
    *[RankWorld.evict] * 3,
    *[RankWorld.compress] * 2,
    *[RankWorld.wait] * 2,
    *[RankWorld.ask] * 3,
    *(RankWorld.end, RankWorld.make_room, RankWorld.evict_drafts),
)


def live(group, rank, seed, listens, iterations=40):
    """Make the same calls on every rank, each with bad luck of its own."""
    world, shared = RankWorld(group, rank, seed, listens), Random(seed)
    told = []
    for _ in range(iterations):
        world.begin()
        for _ in range(shared.randrange(1, 4)):
            shared.choice(STEPS)(world, shared.choice(TEXTS))
        told.append((list(world.log), world.summary()))
    while world.requests:
        world.end("")
    world.release()
    world.segments.make_room(10**9)
    return told, world.page_pool.used_bytes


@settings(max_examples=6)
@given(st.integers(0, 10**6))
def test_indices_are_the_same_however_the_ranks_differ(ranks, seed):
    answers = ranks.call(live, seed, True)
    assert not any(isinstance(answer, Exception) for answer in answers), answers
    for step in zip(*(told for told, _ in answers), strict=True):
        assert step[0] == step[1] == step[2]
    assert [used for _, used in answers] == [0] * 3


def test_the_ranks_had_something_to_agree_on(ranks):
    """Without the exchange they part; and histories reach every kind of outcome."""
    assert ranks.call(live, 1, False)[0][0] != ranks.call(live, 1, False)[1][0]
    logs = [entry for seed in range(6) for entry in ranks.call(live, seed, True)[0][0]]
    seen = [entry for log, _ in logs for entry in log if isinstance(entry, tuple)]
    assert any(entry[0] == "restored" and not entry[2] for entry in seen)
    assert any(entry[0] == "restored" and entry[2] for entry in seen)
    assert any(entry[0] == "fetched" and entry[2] > 0 for entry in seen)
    assert any(entry[0] == "compressed" and not entry[2] for entry in seen)


# -- single exchanges -----------------------------------------------------------------


def cache(group, sizes, rank):
    pool = HostPagePool(sizes[rank], 64, pinned=False)
    sync = TensorParallelSync(Estimates(), group)
    return TensorParallelCache(sync, pool), sync, pool


def take_pages(group, rank, sizes):
    """Take page after page; the rank with the least memory refuses for all."""
    common, sync, pool = cache(group, sizes, rank)
    sync.sync_errors(False, common.tell(None))
    common.receive(sync.told, None)
    taken = 0
    while pool.take(64) is not None:
        taken += 1
    pool.check()
    return taken, pool.free_bytes, common.now()


def test_host_memory_is_as_large_as_that_of_the_fullest_rank(ranks):
    answers = ranks.call(take_pages, (640, 320, 1024))
    assert answers == [answers[0]] * 3
    assert answers[0][:2] == (5, 0)


def fail_as_it_restores(group, rank):
    """Fail on rank 1 before it tells whether its copies were intact."""
    common, sync, _ = cache(group, (640,) * 3, rank)
    if rank == 1:
        common.fail()
    with pytest.raises(RankError):
        common.every(-1)
    failed = sync.sync_errors(False)
    sync.recovered()
    return failed, common.every(rank)


def test_a_rank_that_fails_as_it_restores_is_answered(ranks):
    assert ranks.call(fail_as_it_restores) == [(True, [0, 1, 2])] * 3


def fetch_with_a_dead_store(group, rank, dead):
    """Fetch two segments, of which rank 0 has both, rank 1 one; one store may hang."""
    world = RankWorld(group, rank, 1, listens=True)
    whole = {
        "whole": {side: torch.zeros(2, SHORT, 2, 4) for side in ("keys", "values")}
    }
    for name in ("p", "pq")[: 1 if rank == 1 else 2]:
        assert world.store.put(name, whole)
    stored = world.segments.stored
    stored.fetch("r", ["p", "pq"], 0)
    found = []
    for _ in range(3):
        if world.store.reads and rank != dead:
            world.store.arrive()
        if len(found) == 1:
            for fetch in stored._fetches.values():
                fetch.deadline = 0.0
        world.sync.sync_errors(False, world.ranks.tell(stored))
        world.ranks.receive(world.sync.told, stored)
        found.append(stored.found("r"))
    return found, stored.take("r", found[-1]), world.segments.reach(["p", "pq"], 0)


def test_what_the_store_has_counts_as_far_as_all_ranks_have_it(ranks):
    assert ranks.call(fetch_with_a_dead_store, None) == [([1] * 3, True, SHORT)] * 3
    waited = [None, 0, 0]
    assert ranks.call(fetch_with_a_dead_store, 2) == [(waited, True, 0)] * 3
