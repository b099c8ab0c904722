"""Prompts compressed each for itself, over one copy of their segments on the host."""

import pytest
import torch

pytest.importorskip("sglang")

from known_kv import parted
from segment_world import SHORT, shorten_segments
from test_compress_segments import ABOVE, SEGMENT_BYTES, left_behind, on_host, to
from tiny_engine import wait_for
from tiny_segments import tiered

from vericache_sglang.prefix_cache.segment import Form, Tier
from vericache_sglang.scheduling.plan import Load, Offload, SwapIn, SwapOut

pytestmark = pytest.mark.sglang

TOKENS = 30
SEGMENTS = TOKENS // SHORT
REST_BYTES = SEGMENT_BYTES * (TOKENS % SHORT) // SHORT


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch, ABOVE)


def opened(**options):
    return tiered(shares=False, **options)


def used(engine):
    return engine.placement.page_pool.used_bytes


def scores(engine):
    """Return the bytes of scores beside one segment, in whole pages."""
    index = engine.segments.copies.index
    name = engine.names(engine.ids("x", TOKENS))[0]
    return index.find(name).host_bytes - SEGMENT_BYTES


def names_of(engine, text="x"):
    return engine.names(engine.ids(text, TOKENS))


def test_requests_with_one_document_hold_one_copy_of_it():
    with opened() as engine:
        states = [on_host(engine, "a")]
        segment = SEGMENT_BYTES + scores(engine)
        once = SEGMENTS * segment + REST_BYTES
        assert used(engine) == once
        for number, (rid, text) in enumerate([("b", "x/24/y"), ("c", "x/24/z")], 1):
            states.append(on_host(engine, rid, text))
            assert used(engine) == once + number * REST_BYTES
        kept = [state.split.kept for state in states]
        assert not torch.equal(kept[0], kept[1]), "each chooses for itself"
        for state in states:
            assert state.split.shared_slots is None, "and has draft KV of its own"
            engine.draft(state.rid)
            engine.verify(state.rid, 1)
        engine.checks.all()
        for rid in "abc":
            engine.finish(rid)
            engine.checks.all()
        assert used(engine) == SEGMENTS * segment
        left_behind(engine)


def test_the_copy_is_a_cached_prefix_once_they_have_ended():
    with opened() as engine:
        on_host(engine, "a")
        engine.abort("a")
        engine.evict()
        before = used(engine)
        images = [engine.segments.wholes.get(name) for name in names_of(engine)]
        state = on_host(engine, "b", "x/24/y")
        assert engine.segments.counters.match_host_tokens == SEGMENTS * SHORT
        assert used(engine) == before + REST_BYTES
        residual = engine.placement.host.residual("b")
        assert list(residual.members[:-1]) == images
        engine.verify(state.rid, 0)
        left_behind(engine)


@pytest.mark.parametrize("swapped", [False, True])
def test_no_copy_is_evicted_from_under_a_request(swapped):
    with opened() as engine:
        on_host(engine, "a")
        assert not swapped or engine.move(SwapOut("a"), "a")
        before = used(engine)
        assert engine.segments.evictable_bytes == 0
        engine.evict()
        engine.segments.make_room(10**9)
        assert used(engine) == before
        engine.checks.all()
        assert not swapped or engine.move(SwapIn("a"), "a")
        engine.verify("a", 0)
        engine.abort("a")
        assert engine.segments.evictable_bytes == used(engine) > 0
        left_behind(engine)


def test_what_is_offloaded_again_needs_no_copy_of_its_segments():
    with opened() as engine:
        state = on_host(engine, "a")
        before = used(engine)
        sent = engine.placement.counters.offloaded_bytes
        assert engine.move(Load("a"), "a")
        assert engine.segments.evictable_bytes == used(engine) == before - REST_BYTES
        assert engine.move(Offload("a"), "a")
        assert used(engine) == before
        again = engine.placement.counters.offloaded_bytes - sent
        assert again == SEGMENT_BYTES * (TOKENS % SHORT) // SHORT
        engine.verify("a", 0)
        assert state.split.segments == tuple(names_of(engine))
        left_behind(engine)


def test_a_damaged_copy_fails_the_prefetch_and_is_not_shared_again():
    with opened() as engine:
        state = on_host(engine, "a")
        first = names_of(engine)[0]
        engine.damage(first)
        engine.placement.start_prefetch(state)
        assert wait_for(engine.placement.prefetches) == ([], ["a"])
        engine.placement.distrust(state)
        other = on_host(engine, "b", "x/24/y")
        assert other.split.segments == ()
        engine.verify("b", 0)
        engine.abort("a")
        engine.segments.check()
        assert engine.segments.wholes.get(first) is None
        assert on_host(engine, "c").split.segments == tuple(names_of(engine))
        engine.verify("c", 0)
        left_behind(engine)


def test_a_request_that_opts_out_of_the_cache_shares_nothing():
    with opened() as engine:
        on_host(engine, "a")
        before = used(engine)
        state = on_host(engine, "b", insertable=False)
        assert state.split.segments == ()
        assert used(engine) > before + REST_BYTES
        left_behind(engine)


def test_equal_prompts_share_all_of_it_and_its_staging():
    with opened() as engine:
        on_host(engine, "a")
        before = used(engine)
        on_host(engine, "b")
        assert used(engine) == before
        keys = {engine.placement.staging_key(rid) for rid in "ab"}
        assert len(keys) == 1
        engine.abort("a")
        engine.verify("b", 0)
        left_behind(engine)


def test_without_room_for_what_is_missing_nothing_changes():
    with opened() as engine:
        state = engine.admit("a", "x", TOKENS)
        pool = engine.placement.page_pool
        hog = pool.take(pool.free_bytes - SEGMENTS * SEGMENT_BYTES)
        before = engine.checks.held()
        assert not engine.move(to("a", "host"), "a")
        assert engine.checks.held() == before
        assert state.parts is None
        hog.free()
        assert engine.move(to("a", "host"), "a")
        left_behind(engine)


def test_a_copy_that_fails_leaves_no_image_behind(monkeypatch):
    with opened() as engine:
        engine.admit("a", "x", TOKENS)
        books = engine.checks.books()

        def refuse(*_):
            raise RuntimeError("no copy")

        with monkeypatch.context() as patch:
            patch.setattr(engine.placement.handles.transfers, "save", refuse)
            with pytest.raises(RuntimeError, match="no copy"):
                engine.move(to("a", "host"), "a")
        assert engine.checks.books() == books
        assert engine.segments.wholes.get(names_of(engine)[0]) is None
        engine.segments.check()
        assert engine.move(to("a", "host"), "a")
        left_behind(engine)


def test_a_segment_in_use_is_full_kv_on_the_host():
    with opened() as engine:
        on_host(engine, "a")
        index = engine.segments.copies.index
        for name in names_of(engine):
            assert index.find(name).has(Form.WHOLE)
            assert index.get(name).content.residual.tier is Tier.HOST
        assert index.total(Tier.HOST).tokens == SEGMENTS * SHORT
        residual = engine.placement.host.residual("a")
        kept = engine.requests["a"].state.split.kept
        for layer in range(residual.layers):
            found = residual.blocks(layer, None)
            order = parted(kept, TOKENS)[layer][:, kept.shape[2] :]
            kv = engine.kv.truth("x")[0][layer]
            for side, (block,) in enumerate(found):
                for head, tokens in enumerate(order.tolist()):
                    own = block.view(torch.int32)[:, head]
                    assert torch.equal(own, kv[side][tokens, head])
        left_behind(engine)
