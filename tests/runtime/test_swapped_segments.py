"""A request that lists a shared draft part, and no slot of its own, is parked."""

import pytest

pytest.importorskip("sglang")

from segment_world import shorten_segments
from test_compress_segments import ABOVE, left_behind, on_host
from tiny_segments import tiered

from vericache_sglang.scheduling.plan import Residency, SwapIn, SwapOut

pytestmark = pytest.mark.sglang


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch, ABOVE)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("moves", [1, 3])
def test_a_request_that_decoded_nothing_is_swapped_and_resumed(page, moves):
    """Its row lists a shared draft part, and no slot of its own."""
    with tiered(page=page, recent_tokens=0) as engine:
        state = on_host(engine, "a", "x", 24)
        assert (
            state.row_length
            == state.split.shared_count
            == state.req.kv.kv_allocated_len
        )
        for _ in range(moves):
            assert engine.move(SwapOut("a"), "a")
            engine.checks.all()
            engine.admit("b", "w", 20)
            engine.abort("b")
            engine.evict()
            assert engine.move(SwapIn("a"), "a")
            engine.checks.all()
        engine.verify("a", 0)
        left_behind(engine)


def test_a_swapped_row_of_no_slots_is_aborted():
    with tiered(recent_tokens=0) as engine:
        on_host(engine, "a", "x", 24)
        assert engine.move(SwapOut("a"), "a")
        engine.abort("a")
        left_behind(engine)


@pytest.mark.parametrize("what", ["slots", "host memory"])
def test_a_row_of_no_slots_is_not_swapped_without_room(what):
    with tiered(recent_tokens=0) as engine:
        state = on_host(engine, "a", "x", 24)
        page_pool = engine.placement.page_pool
        if what == "slots":
            engine.evict()
            hog = engine.allocator.alloc(engine.allocator.available_size())
        else:
            hog = page_pool.take(page_pool.free_bytes)
        before = engine.checks.held()
        assert not engine.move(SwapOut("a"), "a")
        assert (engine.checks.held(), state.residency) == (before, Residency.HOST)
        if what == "slots":
            engine.allocator.free(hog)
        else:
            hog.free()
        assert engine.move(SwapOut("a"), "a")
        engine.checks.all()


def test_scores_of_what_lies_behind_shared_parts_are_swapped_with_it():
    """``admit`` compares the scores of cached tokens with the text's own."""
    with tiered() as engine:
        on_host(engine, "a", "x", 30)
        assert engine.move(SwapOut("a"), "a")
        engine.admit("e", "w", 44)
        engine.abort("e")
        engine.evict()
        assert engine.move(SwapIn("a"), "a")
        engine.finish("a")
        state = engine.admit("b", "x", 30)
        assert len(state.req.prefix_indices) > 24
        left_behind(engine)
