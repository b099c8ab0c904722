"""A prompt in two parts: what is kept, what is packed, and what a refusal leaves."""

import pytest
import torch

pytest.importorskip("sglang")

from known_kv import HEADS, LAYERS
from tiny_engine import opened

from vericache_sglang.scheduling.plan import Compress, Residency, Restore

pytestmark = pytest.mark.sglang

PLANES = "split-planes:exponent_bits=4,mantissa_bits=3,block=4"
KINDS = pytest.mark.parametrize(
    ("codec", "selects"), [("", True), (PLANES, False), (PLANES, True)]
)
TO_HOST, TO_DEVICE = Compress("a", Residency.HOST), Compress("a", Residency.DEVICE)


def best(scores, kept, sinks, recent):
    """Choose in a loop: the protected tokens, then those of the highest scores."""
    tokens = range(len(scores))
    always = {t for t in tokens if t < sinks or t >= len(scores) - recent}
    others = sorted((-scores[t], t) for t in tokens if t not in always)
    return sorted([*always, *(t for _, t in others[: kept - len(always)])])


@pytest.mark.parametrize("move", [TO_HOST, TO_DEVICE])
def test_every_head_keeps_its_own_best_tokens(move):
    with opened() as engine:
        state = engine.admit("a", "x", 30)
        assert engine.move(move, "a")
        scores = engine.kv.truth("x")[1]
        for layer in range(LAYERS):
            for head in range(HEADS):
                wanted = best(scores[layer, head, :30].tolist(), 15, 2, 3)
                assert state.split.kept[layer, head].tolist() == wanted
        assert state.split.coded.shape == (LAYERS, HEADS, 0)


@pytest.mark.parametrize("page", [1, 4])
def test_what_is_kept_is_packed_in_blocks_behind_the_sinks(page):
    with opened(codec=PLANES, page=page) as engine:
        state = engine.admit("a", "x", 34)
        assert engine.move(TO_HOST, "a")
        parts, body = state.split, 34 // page * page
        kept = {1: 17, 4: 16}[page]
        # Sinks 2; recent 3, of which a broken page of 2 tokens holds all but one.
        recent = {1: 3, 4: 1}[page]
        coded = (kept - 2 - recent) // 4 * 4
        scores = engine.kv.truth("x")[1]
        for layer in range(LAYERS):
            for head in range(HEADS):
                row = best(scores[layer, head, :body].tolist(), kept, 2, recent)
                assert parts.coded[layer, head].tolist() == row[2 : 2 + coded]
                exact = [*row[:2], *row[2 + coded :]]
                assert parts.kept[layer, head].tolist() == exact
        assert (parts.budget.exact, parts.budget.coded) == (kept - coded, coded)


def test_without_a_selector_every_token_is_kept():
    with opened(codec=PLANES, selects=False) as engine:
        state = engine.admit("a", "x", 30)
        assert engine.move(TO_HOST, "a")
        both = torch.cat([state.split.kept, state.split.coded], dim=2).sort().values
        assert both.tolist() == [[list(range(30))] * HEADS] * LAYERS
        assert state.split.budget.dropped == 0
        assert state.split.coded[0, 0].tolist() == list(range(2, 26))


@KINDS
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("insertable", [True, False])
def test_without_a_free_slot_the_row_s_own_become_the_draft_part(
    codec, selects, page, insertable
):
    """Where the tree owns them, our lock on it is all that keeps them."""
    with opened(codec=codec, selects=selects, page=page) as engine:
        state = engine.admit("a", "x", 30, insertable=insertable)
        assert (state.req.kv.cache_protected_len > 0) is insertable
        hog = engine.allocator.alloc(engine.allocator.available_size())
        assert engine.tree.evictable_size() == 0
        assert engine.move(TO_HOST, "a")
        engine.checks.row(engine.requests["a"])
        engine.allocator.free(hog)
        engine.checks.all()
        engine.verify("a", 0)
        engine.finish("a")
        engine.checks.all()


@KINDS
def test_another_row_s_lock_keeps_the_tree_s_slots(codec, selects):
    with opened(codec=codec, selects=selects) as engine:
        engine.admit("a", "x", 30)
        engine.admit("b", "x", 31)  # locks the same prefix
        engine.allocator.alloc(engine.allocator.available_size())
        before = engine.checks.held()
        assert not engine.move(TO_HOST, "a")
        assert not engine.move(TO_DEVICE, "a")
        assert engine.checks.held() == before
        assert engine.requests["a"].state.residency is None


@KINDS
def test_a_split_beyond_the_host_budget_changes_nothing(codec, selects):
    with opened(codec=codec, selects=selects) as engine:
        engine.admit("a", "x", 30)
        page_pool = engine.placement.page_pool
        assert page_pool.take(page_pool.free_bytes - page_pool.page_bytes)
        before = engine.checks.held()
        assert not engine.move(TO_HOST, "a")
        assert engine.checks.held() == before


@KINDS
def test_the_host_counts_what_it_holds(codec, selects):
    with opened(codec=codec, selects=selects) as engine:
        engine.admit("a", "x", 30)
        assert engine.move(TO_HOST, "a")
        store = engine.placement.host
        held = store.residual("a")
        assert store.used_bytes == held.held_bytes >= held.nbytes
        most = store.residual_bytes(engine.requests["a"].state.split.budget)
        assert engine.placement.counters.peak_host_bytes == most >= store.used_bytes


@KINDS
def test_slots_of_the_tree_are_not_written(codec, selects):
    for move in (TO_HOST, TO_DEVICE):
        with opened(codec=codec, selects=selects) as engine:
            engine.admit("a", "x", 30)
            engine.admit("b", "x", 33)
            assert engine.move(move, "a")
            engine.draft("a")
            engine.verify("a", 1)
            engine.checks.all()  # b's row lists the same prefix, bit for bit
            engine.finish("a")
            engine.checks.all()


def test_a_prompt_is_split_where_that_saves_slots():
    with opened(page=4, codec=PLANES, selects=False) as engine:
        budget = engine.placement.compressor.budget
        assert budget(3) is None, "shorter than --vericache-min-prompt"
        assert budget(4) is None, "nothing can be packed"
        assert budget(24).slots < budget(24).offered == 24
    with opened(page=4) as engine:
        budget = engine.placement.compressor.budget
        assert budget(5) is None, "one page holds the draft part, and all there is"
        assert (budget(9).offered, budget(9).kept) == (8, 4)
        assert (budget(32, 0.25).kept, budget(32, 1.0)) == (8, None)


def test_the_selector_is_opened_once_whatever_moves_follow():
    with opened() as engine:
        engine.admit("a", "x", 30)
        for move in (TO_DEVICE, Restore("a"), TO_HOST):
            assert engine.move(move, "a")
        engine.finish("a")
        calls = engine.selector.calls
        assert calls[0] == ("open", "a")
        assert [kind for kind, _ in calls].count("open") == 1
        assert calls[-1] == ("close", "a")
        assert len(engine.placement.observer) == 0
