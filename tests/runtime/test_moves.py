"""Splits, moves and joins over a tiny pool: every bit in place, every slot accounted.

The pool's entries are random bits, so rows are compared with what they were written.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

from tiny_engine import opened

from vericache_patches.managers_schedule_policy import running_request_offset
from vericache_sglang.errors import LostKVError
from vericache_sglang.scheduling.plan import (
    Compress,
    Load,
    Offload,
    Residency,
    Restore,
    SwapIn,
    SwapOut,
)

pytestmark = pytest.mark.sglang

PLANES = "split-planes:exponent_bits=4,mantissa_bits=3,block=4"
TURBO = "turboquant:bits=3"
KINDS = [("", True), (PLANES, False), (PLANES, True), (TURBO, True)]
TO_HOST, TO_DEVICE = Residency.HOST, Residency.DEVICE


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Segments of 16 tokens, so that a tiny prompt has several."""
    monkeypatch.setattr("vericache_sglang.kv.segment_length.SEGMENT", 16)
    monkeypatch.setattr("vericache_sglang.kv.packed_drafts.SEGMENT", 16)


def drafts_on_a_row(state):
    """The request has a row that lists its draft part."""
    return state.residency is Residency.HOST or (
        state.parts is not None and state.parts.draft_row >= 0
    )


def moves_of(state):
    """What a plan may ask of a request, by how its row lists it."""
    rid = state.rid
    splits = [Compress(rid, TO_HOST), Compress(rid, TO_DEVICE)]
    back = [Offload(rid), Restore(rid)]
    return {
        None: splits,
        Residency.DEVICE: back,
        Residency.HOST: [Load(rid), SwapOut(rid)],
        Residency.SWAPPED: [SwapIn(rid)],
    }[state.residency]


class History:
    """Requests that come, move, decode and go, as a list of steps says."""

    def __init__(self, engine, shortest=20):
        self.engine, self.shortest, self.made = engine, shortest, []

    def step(self, act, who, number, check=True):
        rid, engine = "abc"[who], self.engine
        request = engine.requests.get(rid)
        if request is None:
            tokens = self.shortest + number * 3
            engine.admit(rid, "xxy"[who], tokens, insertable=number != 2)
        elif act == "end":
            (engine.abort if number == 5 else engine.finish)(rid)
        elif act == "move":
            moves = moves_of(request.state)
            move, before = moves[number % len(moves)], request.state.residency
            if engine.move(move, rid):
                self.made.append((before, move))
        else:
            self.decode(request.state, number)
        if check:
            engine.checks.all()

    def decode(self, state, number):
        if state.residency is Residency.SWAPPED:
            return
        if not drafts_on_a_row(state):
            self.engine.plain(state.rid)
        elif len(state.drafts) < 4 and number:
            self.engine.draft(state.rid)
        else:
            self.engine.verify(state.rid, number)


STEP = st.tuples(
    st.sampled_from(["move", "move", "move", "decode", "decode", "decode", "end"]),
    st.integers(0, 2),
    st.integers(0, 5),
)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("codec", "selects"), KINDS)
def test_any_history_keeps_every_bit_and_every_slot(codec, selects, cached, page):
    dtype = torch.bfloat16 if codec == PLANES else torch.float32
    options = {"codec": codec, "selects": selects, "cached": cached, "dtype": dtype}

    @settings(deadline=None, max_examples=10)
    @given(st.lists(STEP, min_size=10, max_size=40))
    def histories(steps):
        with opened(page=page, slots=120, **options) as engine:
            history = History(engine)
            for step in steps:
                history.step(*step)
            for rid in list(engine.requests):
                engine.finish(rid)
            engine.checks.all()
            assert engine.placement.host.used_bytes == 0
            assert len(engine.placement.observer) == 0

    histories()


def on_host(engine, rid="a", text="x", tokens=30, **options):
    """Admit a request and move its complement to the host."""
    state = engine.admit(rid, text, tokens, **options)
    assert engine.move(Compress(rid, TO_HOST), rid)
    assert state.residency is Residency.HOST
    return state


def flip_a_bit(image):
    """Damage the last layer of an image in host memory."""
    part = next(part for part in image._parts(1) if part.numel())
    part.view(-1).view(torch.uint8)[:1] ^= 1


ALL_KINDS = pytest.mark.parametrize(("codec", "selects"), KINDS)
WITH_DROPS = pytest.mark.parametrize(
    ("codec", "selects"), [kind for kind in KINDS if kind[1]]
)


@WITH_DROPS
def test_a_finished_row_over_a_damaged_copy_is_released_uncached(codec, selects):
    with opened(codec=codec, selects=selects) as engine:
        free = engine.allocator.available_size()
        on_host(engine)
        engine.evict()  # the row's prefill; whole in the tree, it would be taken there
        flip_a_bit(engine.placement.host.residual("a"))
        engine.finish("a")
        engine.checks.all()
        assert engine.placement.counters.restores == 0
        assert engine.allocator.available_size() == free


@WITH_DROPS
def test_a_damaged_copy_is_not_pinned_and_takes_no_slot(codec, selects, caplog):
    with opened(codec=codec, selects=selects) as engine:
        on_host(engine)
        flip_a_bit(engine.placement.host.residual("a"))
        before = engine.checks.books()
        with pytest.raises(LostKVError):
            engine.move(Load("a"), "a")
        assert "residual KV checksum differs in layer 1" in caplog.text
        assert engine.checks.books() == before


@ALL_KINDS
def test_a_damaged_swapped_image_is_not_resumed_and_takes_no_slot(
    codec, selects, caplog
):
    with opened(codec=codec, selects=selects) as engine:
        state = on_host(engine)
        assert engine.move(SwapOut("a"), "a")
        engine.checks.all()
        flip_a_bit(engine.placement.host.swapped("a"))
        before = engine.checks.books()
        with pytest.raises(LostKVError):
            engine.move(SwapIn("a"), "a")
        assert "swapped image checksum differs in layer 1" in caplog.text
        assert engine.checks.books() == before
        assert state.residency is Residency.SWAPPED


@ALL_KINDS
@pytest.mark.parametrize("page", [1, 4])
def test_moves_without_room_change_nothing(codec, selects, page):
    with opened(codec=codec, selects=selects, page=page) as engine:
        on_host(engine, insertable=False)
        hog = engine.allocator.alloc(engine.allocator.available_size())
        assert engine.tree.evictable_size() == 0
        before = engine.checks.held()
        assert not engine.move(Load("a"), "a")
        assert engine.checks.held() == before
        assert engine.move(SwapOut("a"), "a")
        rest = engine.allocator.alloc(engine.allocator.available_size())
        before = engine.checks.held()
        assert not engine.move(SwapIn("a"), "a")
        assert engine.checks.held() == before
        engine.allocator.free(torch.cat([hog, rest]))
        assert engine.move(SwapIn("a"), "a")
        engine.checks.all()


def test_admission_leaves_room_for_a_swapped_out_request():
    """SGLang adds what a running request may still take; ours comes on top."""
    with opened() as engine:
        state = on_host(engine)
        held = state.row_length
        for move, more in ((SwapOut("a"), held), (SwapIn("a"), 0)):
            assert engine.move(move, "a")
            assert running_request_offset(lambda adder, req: 7, None, state.req) == (
                7 + more
            )


@ALL_KINDS
def test_moves_beyond_the_host_budget_change_nothing(codec, selects):
    with opened(codec=codec, selects=selects) as engine:
        page_pool = engine.placement.page_pool
        engine.admit("a", "x", 30)
        assert engine.move(Compress("a", TO_DEVICE), "a")
        hog = page_pool.take(page_pool.free_bytes - page_pool.page_bytes)
        before = engine.checks.held()
        assert not engine.move(Offload("a"), "a")
        assert engine.checks.held() == before
        hog.free()
        assert engine.move(Offload("a"), "a")
        assert page_pool.take(page_pool.free_bytes)
        before = engine.checks.held()
        assert not engine.move(SwapOut("a"), "a")
        assert engine.checks.held() == before


@ALL_KINDS
@pytest.mark.parametrize("page", [1, 4])
def test_a_row_the_tree_has_already_takes_the_tree_s_slots(codec, selects, page):
    with opened(codec=codec, selects=selects, page=page) as engine:
        on_host(engine, "a")
        on_host(engine, "b")
        engine.finish("a")
        listed = engine.tree.evictable_size()
        engine.finish("b")
        engine.checks.all()
        assert engine.tree.evictable_size() == listed, "one copy of equal prompts"
        assert engine.placement.counters.restores == 2


@pytest.mark.parametrize(
    ("insertable", "cached"), [(True, True), (False, True), (True, False)]
)
def test_a_row_is_joined_only_for_a_tree_that_takes_it(insertable, cached):
    with opened(cached=cached) as engine:
        on_host(engine, insertable=insertable)
        engine.finish("a")
        assert engine.placement.counters.restores == (insertable and cached)
        assert (engine.tree.evictable_size() > 0) == (insertable and cached)


@ALL_KINDS
def test_the_choice_outlives_an_unsplit_and_the_user_s_wish_returns(codec, selects):
    for insertable in (True, False):
        with opened(codec=codec, selects=selects) as engine:
            state = engine.admit("a", "x", 30, insertable=insertable)
            assert engine.move(Compress("a", TO_DEVICE), "a")
            kept, coded = state.split.kept.clone(), state.split.coded.clone()
            assert state.req.skip_radix_cache_insert
            assert engine.move(Restore("a"), "a")
            if state.residency is None:
                assert state.req.skip_radix_cache_insert is not insertable
            assert engine.move(Compress("a", TO_HOST), "a")
            assert torch.equal(state.split.kept, kept)
            assert torch.equal(state.split.coded, coded)
            engine.finish("a")
            engine.checks.all()


def test_scores_follow_their_tokens_through_every_move():
    """``admit`` compares the scores of cached tokens with the text's own."""
    for moves in (
        [Compress("a", TO_HOST)],
        [Compress("a", TO_HOST), Load("a")],
        [Compress("a", TO_HOST), SwapOut("a"), SwapIn("a")],
        [Compress("a", TO_DEVICE), Restore("a"), Compress("a", TO_HOST)],
        [Compress("a", TO_HOST), Load("a"), Restore("a")],
    ):
        for codec, page in (("", 1), ("", 4), (PLANES, 1)):
            with opened(codec=codec, page=page) as engine:
                engine.admit("a", "x", 31)
                for move in moves:
                    assert engine.move(move, "a")
                    engine.admit("b", "y", 40)  # writes its scores where it can
                    engine.abort("b")
                    engine.evict()  # or the tree would answer for the row
                engine.finish("a")
                engine.admit("c", "x", 40)
                held = engine.requests["c"].state.req.kv.cache_protected_len
                assert held >= 31 // page * page
