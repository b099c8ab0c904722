"""Draft KV of segments from a store in a row, before their residual KV: bit by bit."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from segment_world import SHORT, shorten_segments
from test_coded_segments import LINES
from test_compress_segments import ABOVE, left_behind
from tiny_segments import tiered

from vericache_sglang.kv.row_edit import allocate
from vericache_sglang.prefix_cache.early_segments import EarlySegments
from vericache_sglang.scheduling.plan import (
    Complete,
    Compress,
    Load,
    Residency,
    Restore,
)

pytestmark = pytest.mark.sglang

WHOLE = 3
TOKENS = WHOLE * SHORT + 5


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch, (*ABOVE, "early_segments"))


def stored_parts(engine, names):
    """Return both parts of a prompt's segments, which then are nowhere else."""
    assert engine.admit("first", "x", TOKENS)
    assert engine.move(Compress("first", Residency.HOST), "first")
    parts = [engine.segments.copies.read_parts(name) for name in names]
    engine.finish("first")
    engine.evict()
    engine.segments.make_room(10**9)
    assert engine.segments.reach(names, 0) == 0
    found = [{"draft": draft, "residual": rest} for draft, rest in parts]
    return [SimpleNamespace(parts=each) for each in found]


def start(engine, early, rid, names, found):
    """Give a request a row of draft KV, and the KV of the end of its prompt."""
    state = engine.admit(rid, "x", TOKENS, insertable=False)
    record = state.req.kv
    row = engine.table[record.req_pool_idx]
    own = row[record.cache_protected_len : record.kv_allocated_len]
    engine.allocator.free(own.to(torch.int64))
    engine.tree.unpin(state.req)
    state.req.skip_radix_cache_insert = False
    drafts = early.enter(rid, names, found, engine.tree)
    budget = engine.placement.compressor.of_segments(len(names))
    state.parts = early.parts(budget, names, drafts, found)
    suffix = TOKENS - budget.offered
    own = allocate(engine.tree, -(-suffix // engine.page) * engine.page)
    early.list_row(state.req, state.parts, own[:suffix])
    end = record.kv_allocated_len  # here rows grow by whole pages
    row[end : end + len(own) - suffix] = own[suffix:].to(row.dtype)
    record.kv_allocated_len += len(own) - suffix
    kv, _ = engine.kv.truth("x")
    engine.kv.put(own[:suffix], kv[:, :, budget.offered : TOKENS])
    state.inexact = suffix
    engine.placement.note(state)
    engine.checks.all()
    return state


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("codec", ["", *LINES.values()], ids=["", *LINES])
def test_two_requests_draft_on_shared_draft_kv_and_are_verified_once_it_is_complete(
    codec, page
):
    with tiered(page=page, slots=320, codec=codec, stores=True) as engine:
        names = engine.names(engine.ids("x", TOKENS))[:WHOLE]
        found = stored_parts(engine, names)
        early = EarlySegments(engine.segments, engine.placement.handles)
        assert early.fit(names, found)
        states = [start(engine, early, rid, names, found) for rid in "ab"]
        assert torch.equal(states[0].parts.shared_slots, states[1].parts.shared_slots)
        for rid in "abba":
            engine.draft(rid)
            engine.checks.all()
        assert engine.segments.reach(names, 0) == 0, "no prompt is matched with half"
        for name, each in zip(names, found, strict=True):
            for _ in "ab":  # each reads it from the store
                assert early.take(name, each, None)
        for rid, state in zip("ab", states, strict=True):
            assert not engine.placement.make(Restore(rid), state, engine.tree)
            assert engine.move(Complete(rid), rid)
            assert state.residency is Residency.HOST
            engine.checks.all()
        assert engine.segments.reach(names, 0) == WHOLE * SHORT
        engine.verify("a", 1)
        assert engine.move(Load("b"), "b")
        engine.verify("b", 2)
        for state in states:  # what its first verification does (``MixedForward``)
            state.inexact = 0
        engine.checks.all()
        engine.draft("a")
        left_behind(engine)


@pytest.mark.parametrize("ends", ["finish", "abort"])
@pytest.mark.parametrize("came", [0, 1, WHOLE])
def test_one_that_ends_before_it_was_verified_leaves_nothing(ends, came):
    """Its end of the prompt is inexact: that is not cached."""
    with tiered(slots=320) as engine:
        names = engine.names(engine.ids("x", TOKENS))[:WHOLE]
        found = stored_parts(engine, names)
        early = EarlySegments(engine.segments, engine.placement.handles)
        start(engine, early, "a", names, found)
        engine.draft("a")
        for name, each in zip(names[:came], found[:came], strict=True):
            assert early.take(name, each, None)
        if came == WHOLE:
            assert engine.move(Complete("a"), "a")
        getattr(engine, ends)("a")
        engine.checks.all()
        assert engine.segments.reach(names, 0) == (WHOLE * SHORT) * (came == WHOLE)
        left_behind(engine)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("codec", ["", *LINES.values()], ids=["", *LINES])
def test_beside_full_kv_of_a_part_entries_fit_and_codes_do_not(codec, on_host):
    """Which was computed here, and may be rounded otherwise than what is stored."""
    with tiered(slots=320, codec=codec, stores=True) as engine:
        names = engine.names(engine.ids("x", TOKENS))[:WHOLE]
        found = stored_parts(engine, names)
        assert engine.admit("here", "x", 2 * SHORT + 3)
        engine.finish("here")
        if on_host:
            engine.evict()
        early = EarlySegments(engine.segments, engine.placement.handles)
        assert early.fit(names, found) is not bool(codec)
        if codec:
            return
        state = start(engine, early, "a", names, found)
        engine.draft("a")
        for name, each in zip(names, found, strict=True):
            assert early.take(name, each, None)
        assert engine.move(Complete("a"), "a")
        engine.checks.all()
        engine.verify("a", 1)
        state.inexact = 0
        engine.draft("a")
        engine.finish("a")
        engine.checks.all()
        left_behind(engine)


def test_other_kept_tokens_do_not_fit():
    with tiered(slots=320) as engine:
        names = engine.names(engine.ids("x", TOKENS))[:WHOLE]
        found = stored_parts(engine, names)
        early = EarlySegments(engine.segments, engine.placement.handles)
        start(engine, early, "a", names, found)
        assert early.fit(names, found)
        other = found[0].parts["draft"]["kept"].flip(2)
        changed = {**found[0].parts["draft"], "kept": other}
        assert not early.fit(
            names, [SimpleNamespace(parts={"draft": changed}), *found[1:]]
        )
        engine.abort("a")
        left_behind(engine)


def test_without_free_slots_or_host_pages_nothing_changes():
    with tiered(slots=320, host_segments=WHOLE) as engine:
        names = engine.names(engine.ids("x", TOKENS))[:WHOLE]
        found = stored_parts(engine, names)
        early = EarlySegments(engine.segments, engine.placement.handles)
        taken = allocate(engine.tree, engine.allocator.available_size() - 2)
        assert early.enter("a", names, found, engine.tree) is None
        engine.allocator.free(taken)
        engine.checks.all()
        start(engine, early, "a", names, found)
        room = engine.placement.host.free_bytes
        engine.placement.host.swap_out("other", room // 512)
        assert not early.take(names[0], found[0], None)
        engine.placement.host.drop("other")
        engine.abort("a")
        left_behind(engine)
