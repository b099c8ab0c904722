"""Prompts that share segments: histories of moves, every bit and every slot checked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

from known_kv import DIM, HEADS, LAYERS
from segment_world import SHORT, shorten_segments
from test_moves import drafts_on_a_row, moves_of
from tiny_segments import tiered

from vericache_sglang.kv.row_edit import room
from vericache_sglang.prefix_cache.segment import Form
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

TEXTS = {"a": "x", "b": "x", "c": "x/16/y", "d": "x/8/z", "e": "w"}
"""What each request says: others begin like ``a`` for 0 to 3 segments and more."""

SEGMENT_BYTES = SHORT * LAYERS * 2 * HEADS * DIM * 4
"""KV of one segment in float32."""


ABOVE = ("compress", "tiered_cache")


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch, ABOVE)


class History:
    """Requests that come, move, decode and go, while caches fill and empty."""

    def __init__(self, engine):
        self.engine, self.made = engine, []

    def step(self, act, who, number, check=True):
        rid, engine = "abcde"[who], self.engine
        request = engine.requests.get(rid)
        if act == "evict":
            engine.evict()
        elif act == "squeeze":
            engine.segments.make_room(SEGMENT_BYTES * (1 + number))
        elif request is None:
            engine.admit(rid, TEXTS[rid], 14 + number * 5, insertable=number != 2)
        elif act == "end":
            (engine.abort if number == 5 else engine.finish)(rid)
        elif act == "move":
            self.move(request.state, number)
        else:
            self.decode(request.state, number)
        if check:
            engine.checks.all()

    def move(self, state, number):
        if not self.engine.grow(self.engine.requests[state.rid], 1):
            return
        moves = moves_of(state)
        if state.parts is None and self.engine.placement.budget(state) is None:
            return
        move, before = moves[number % len(moves)], state.residency
        if self.engine.move(move, state.rid):
            self.made.append((before, move))

    def decode(self, state, number):
        if state.residency is Residency.SWAPPED:
            return
        if not drafts_on_a_row(state):
            self.engine.plain(state.rid)
        elif len(state.drafts) < 4 and number:
            self.engine.draft(state.rid)
        else:
            self.engine.verify(state.rid, number)


ACTS = [*["move"] * 4, *["decode"] * 3, "end", "evict", "squeeze"]
STEP = st.tuples(st.sampled_from(ACTS), st.integers(0, 4), st.integers(0, 5))


def left_behind(engine):
    """End all; then nothing is left but caches, and those can be emptied."""
    for rid in list(engine.requests):
        engine.finish(rid)
        engine.checks.all()
    engine.evict()
    engine.checks.all()
    assert engine.tree.evictable_size() == engine.tree.protected_size() == 0
    page = engine.page
    assert engine.allocator.available_size() == engine.pool.size // page * page
    engine.segments.make_room(10**9)
    engine.checks.all()
    assert engine.placement.page_pool.used_bytes == 0
    assert engine.segments.evictable_bytes == 0
    assert len(engine.placement.observer) == 0


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(
    ("page", "dtype", "slots", "host_segments"),
    [
        (1, torch.float32, 220, 1000),
        pytest.param(1, torch.bfloat16, 110, 12, marks=pytest.mark.extended),
        pytest.param(4, torch.float32, 140, 1000, marks=pytest.mark.extended),
        (4, torch.bfloat16, 220, 8),
    ],
)
def test_any_history_keeps_every_bit_and_every_slot(
    page, dtype, slots, host_segments, shares
):
    options = {"page": page, "dtype": dtype, "slots": slots, "shares": shares}

    @settings(deadline=None, max_examples=12)
    @given(st.lists(STEP, min_size=10, max_size=40))
    def histories(steps):
        with tiered(host_segments=host_segments, **options) as engine:
            history = History(engine)
            for step in steps:
                history.step(*step)
            left_behind(engine)

    histories()


def to(rid, where):
    return Compress(rid, Residency.HOST if where == "host" else Residency.DEVICE)


def on_host(engine, rid, text="x", tokens=30, **options):
    state = engine.admit(rid, text, tokens, **options)
    assert engine.move(to(rid, "host"), rid)
    assert state.residency is Residency.HOST
    return state


def test_an_unsplit_row_that_still_lists_shared_slots_keeps_them():
    with tiered() as engine:
        state = on_host(engine, "a")
        assert engine.move(Load("a"), "a")
        assert engine.move(Restore("a"), "a")
        assert state.residency is None
        engine.evict()  # overwrites whatever nobody is known to list
        engine.admit("b", "w", 40)
        engine.checks.all()
        assert engine.move(to("a", "device"), "a")
        engine.draft("a")
        engine.verify("a", 1)
        left_behind(engine)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_running_request_s_segments_are_not_forgotten(swapped):
    with tiered() as engine:
        on_host(engine, "a")
        assert not swapped or engine.move(SwapOut("a"), "a")
        engine.segments.make_room(10**9)
        engine.checks.all()
        assert not swapped or engine.move(SwapIn("a"), "a")
        engine.verify("a", 0)
        left_behind(engine)


def test_bytes_a_running_request_needs_are_not_counted_as_room():
    """What cannot be freed is passed over, and the next segment goes instead."""
    with tiered(host_segments=14) as engine:
        on_host(engine, "a", "x", 44)
        engine.admit("e", "w", 44)
        engine.abort("e")
        engine.evict()
        before = engine.placement.page_pool.free_bytes
        engine.segments.make_room(SEGMENT_BYTES)
        assert engine.placement.page_pool.free_bytes >= before + SEGMENT_BYTES
        engine.checks.all()


def test_the_tree_may_lose_a_prefix_that_is_being_split():
    with tiered(slots=96) as engine:
        engine.admit("b", "x", 30, insertable=False)  # holds slots of its own
        engine.admit("a", "x", 30)
        engine.abort("a")  # the tree has the prefix; nobody locks it
        engine.allocator.alloc(engine.allocator.available_size())
        assert engine.move(to("b", "device"), "b")
        engine.segments.check()
        assert engine.requests["b"].state.residency is Residency.DEVICE


def test_a_damaged_segment_that_others_list_is_computed_again():
    with tiered() as engine:
        on_host(engine, "a")
        engine.admit("b", "x", 30)
        assert engine.move(to("b", "host"), "b")
        engine.evict()
        first = engine.names(engine.ids("x", 30))[0]
        engine.damage(first)
        engine.admit("c", "x/8/z", 40)
        assert engine.segments.counters.checksum_failures == 1
        assert engine.requests["c"].state.req.kv.cache_protected_len == 40
        engine.damage(first)  # as it was: a flipped bit flips back
        engine.checks.all()


@pytest.mark.parametrize("split", [False, True])
def test_a_segment_computed_again_is_trusted_again(split):
    with tiered() as engine:
        engine.admit("a", "x", 30)
        assert not split or engine.move(to("a", "host"), "a")
        engine.finish("a")
        engine.evict()
        engine.damage(engine.names(engine.ids("x", 30))[0])
        engine.admit("b", "x", 30)
        engine.finish("b")
        engine.evict()
        engine.checks.all()
        before = engine.segments.counters.match_host_tokens
        engine.admit("c", "x", 30)
        assert engine.segments.counters.match_host_tokens == before + 3 * SHORT


def test_a_draft_part_that_comes_back_is_on_the_device():
    with tiered() as engine:
        on_host(engine, "a")
        engine.finish("a")
        engine.evict()
        (first, *_) = engine.names(engine.ids("x", 30))
        assert engine.segments.copies.index.find(first).has(Form.DRAFT)
        on_host(engine, "b")
        engine.checks.all()
        assert not engine.segments.copies.index.find(first).has(Form.DRAFT)
        left_behind(engine)


def restored(engine, then=()):
    """Have a prompt's segments leave the device and come back in other slots."""
    engine.admit("a", "x", 30)
    for move in then:
        assert engine.move(move, "a")
    engine.finish("a")
    engine.evict()
    engine.admit("e", "w", 44)
    return engine.admit("b", "x", 30)


def test_scores_come_back_with_their_tokens():
    """Or a prompt restored from the host keeps tokens by other tokens' scores."""
    with tiered() as engine:
        state = restored(engine)
        cached = engine.table[state.req.kv.req_pool_idx, : 3 * SHORT].long()
        found = torch.stack(engine.placement.observer.noted(cached))
        assert torch.equal(found, engine.kv.truth("x")[1][..., : 3 * SHORT])


@pytest.mark.parametrize(
    "then",
    [
        [to("a", "host")],
        [to("a", "host"), Load("a"), Offload("a")],
        [to("a", "device"), Offload("a")],
        [to("a", "device"), Restore("a"), to("a", "host")],
    ],
)
def test_scores_of_split_segments_come_back_with_their_tokens(then):
    """Once its parts have left, the prompt is split by them again."""
    with tiered() as engine:
        restored(engine, then)
        engine.segments.check()


@pytest.mark.parametrize("where", ["host", "device"])
def test_what_was_chosen_once_is_chosen_again(where):
    with tiered() as engine:
        state = restored(engine, [to("a", "host")])
        assert engine.placement.compressor.known(state)
        assert engine.move(to("b", where), "b")
        scores = engine.kv.truth("x")[1]
        for layer, head in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            wanted = best_of_each(scores[layer, head].tolist(), 3)
            assert state.split.kept[layer, head].tolist() == wanted
        engine.checks.all()


def best_of_each(scores, segments):
    """Choose in a loop: in each segment the best half, the two sinks among them."""
    wanted = []
    for at in range(segments):
        tokens = range(at * SHORT, (at + 1) * SHORT)
        always = [0, 1] if at == 0 else []
        others = sorted((-scores[t], t) for t in tokens if t not in always)
        chosen = [*always, *(t for _, t in others)][: SHORT // 2]
        wanted += sorted(chosen)
    return wanted


def test_equal_prompts_share_one_draft_part_and_one_residual():
    with tiered() as engine:
        states = [on_host(engine, rid) for rid in "ab"]
        free = room(engine.tree)
        used = engine.placement.page_pool.used_bytes
        states.append(on_host(engine, "c", "x/16/y", 40))
        assert torch.equal(states[0].split.shared_slots, states[1].split.shared_slots)
        each = SHORT // 2
        assert free - room(engine.tree) == 2 * each + 40 - 4 * SHORT
        shared = states[0].split.shared_slots[: 2 * each]
        assert states[2].split.shared_slots[: 2 * each].tolist() == shared.tolist()
        assert engine.placement.page_pool.used_bytes == used * 5 // 3
        engine.checks.all()
        left_behind(engine)


def test_what_a_request_decoded_is_found_by_the_next_turn():
    with tiered() as engine:
        state = on_host(engine, "a", "x", 30)
        for _ in range(24):
            engine.verify("a", 0)
        said = state.req.origin_input_ids + state.req.output_ids
        request = engine.requests["a"]
        kv = engine.kv.truth("x")[0][:, :, :30]
        kv = torch.cat([kv, *request.decoded], dim=2)[:, :, : state.verified]
        engine.finish("a")
        engine.checks.all()
        engine.evict()
        names = engine.names(said[: state.verified])
        assert engine.segments.reach(names, 0) == len(names) * SHORT == 48
        target = torch.arange(48) + engine.pool.staging_start
        assert engine.segments.restore(names[:6], 0, target[:48]) == []
        assert torch.equal(engine.kv.at(target), kv[:, :, :48])


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_split_without_slots_or_host_memory_changes_nothing(where):
    with tiered() as engine:
        engine.admit("a", "x", 30)
        engine.admit("b", "x", 31)  # locks the same prefix
        hog = engine.allocator.alloc(engine.allocator.available_size())
        before = engine.checks.held()
        assert not engine.move(to("a", where), "a")
        assert engine.checks.held() == before
        engine.allocator.free(hog)
        if where == "host":
            page_pool = engine.placement.page_pool
            assert page_pool.take(page_pool.free_bytes - page_pool.page_bytes)
            before = engine.checks.held()
            assert not engine.move(to("a", where), "a")
            assert engine.checks.held() == before
            assert engine.segments.copies.index.residual_bytes == 0


def test_every_segment_keeps_the_best_of_its_own_tokens():
    with tiered() as engine:
        state = on_host(engine, "a", "x", 30)
        scores = engine.kv.truth("x")[1]
        for layer, head in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            wanted = best_of_each(scores[layer, head].tolist(), 3)
            assert state.split.kept[layer, head].tolist() == wanted


def test_prompts_that_fill_no_segment_are_split_as_without_a_tree():
    with tiered() as engine:
        state = engine.admit("a", "x", 10)
        assert engine.placement.compressor.shared_budget(state) is None
        assert engine.move(to("a", "host"), "a")
        assert (state.split.segments, state.split.shared_slots) == ((), None)
        left_behind(engine)
