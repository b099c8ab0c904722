"""Losses worked out by hand, and the order of eviction that follows from prices."""

from dataclasses import replace
from math import exp, inf

import pytest
from forest import EXACT, HALF_LIFE_S, apply, chain_of, parted, whole

from vericache_sglang.prefix_cache.eviction import victims
from vericache_sglang.prefix_cache.index import SegmentIndex
from vericache_sglang.prefix_cache.restore_costs import Prices
from vericache_sglang.prefix_cache.segment import Part, Tier

DEVICE, HOST, STORE, GONE = Tier
DRAFT, RESIDUAL = Part

ONCE = 1 - exp(-1.0)
"""Chance of a segment used once, just now."""

HALF = 1 - exp(-0.5)
"""The same a half-life later."""

KV_BYTES = 512 * 131_072
"""A segment of an 8B model with 32 layers of 8 KV heads of 128, bf16."""

ORDINARY = Prices(
    link_in_s_per_byte=1 / 54e9,
    link_out_s_per_byte=1 / 54e9,
    store_latency_s=1e-3,
    store_s_per_byte=1 / 5e9,
    prefill_s_per_token=4e-5,
    prefill_s_per_square=7e-10,
)
"""PCIe 5 x16, an NVMe store at 5 GB/s, the same model at 400 TFLOPS."""


def moves_of(index, tier, prices, now=0.0, nbytes=1):
    return [
        (move.name, move.part, move.target)
        for move in victims(index, tier, nbytes, now, prices)
    ]


def one(content, now=0.0):
    index = SegmentIndex(HALF_LIFE_S)
    chain_of(index, [content], now)
    return index


def pressed(index, prices, tiers):
    """Free one byte at a time in each tier until it is empty; list what moved."""
    found = []
    for tier in tiers:
        while moves := victims(index, tier, 1, 0.0, prices):
            found += moves
            apply(index, moves)
    return found


def test_one_segment_goes_down_step_by_step_at_the_losses_worked_out_by_hand():
    index = one(parted(256, DEVICE, 1024, DEVICE))
    moves = pressed(index, EXACT, [DEVICE, HOST, STORE])
    assert [(m.part, m.source, m.target) for m in moves] == [
        (RESIDUAL, DEVICE, HOST),
        (DRAFT, DEVICE, HOST),
        (RESIDUAL, HOST, STORE),
        (DRAFT, HOST, STORE),  # with it
        (RESIDUAL, STORE, GONE),
        (DRAFT, STORE, GONE),
    ]
    assert [m.loss_s for m in moves] == [
        ONCE * (1024 / 1024),  # in
        ONCE * (256 / 1024 + 256 / 2048),  # in, and as much out
        ONCE * (0.125 + 1024 / 512 + 0.125 + 256 / 512),
        0.0,
        ONCE * (4.0 + 0.25 - 4.125),  # prefill of 512 tokens, less what restoring takes
        0.0,
    ]
    assert len(index) == 0


def test_a_loss_fades_with_the_half_life():
    index = one(whole(1024, DEVICE))
    (move,) = victims(index, DEVICE, 1, HALF_LIFE_S, EXACT)
    assert move.loss_s == HALF * (1024 / 1024 + 1024 / 2048)
    assert (move.part, move.target) == (RESIDUAL, HOST)


def test_a_segment_is_as_likely_as_the_likeliest_that_follows_it():
    index = SegmentIndex(HALF_LIFE_S)
    root, leaf = chain_of(index, [whole(1024, DEVICE)] * 2)
    index.touch([leaf], 64.0)
    moves = victims(index, DEVICE, 2048, 64.0, EXACT)
    chance = 1 - exp(-1.5)
    assert [(m.name, m.loss_s) for m in moves] == [
        (leaf, chance * 1.5),
        (root, chance * 1.5),
    ]


def test_letting_a_segment_go_costs_what_follows_it_in_other_tiers_too():
    index = SegmentIndex(HALF_LIFE_S)
    root, leaf = chain_of(index, [whole(512, STORE), whole(512, HOST)])
    (alone,) = chain_of(index, [whole(512, STORE)], name="alone")
    index.touch([alone], 0.0)
    own = 4.25 - (0.125 + 1.0 + 0.5 + 0.25)
    follows = 4.0 + 0.75 - (0.5 + 0.25)
    moves = victims(index, STORE, 1024, 0.0, EXACT)
    assert [(m.name, m.loss_s) for m in moves] == [
        (alone, (1 - exp(-2.0)) * own),
        (root, ONCE * own + ONCE * follows),
    ]
    index.drop(leaf)
    assert [m.name for m in victims(index, STORE, 1, 0.0, EXACT)] == [root]


def test_what_has_left_by_then_is_not_counted_even_behind_what_stays():
    index = SegmentIndex(HALF_LIFE_S)
    tiers = [STORE, HOST, STORE]
    names = chain_of(index, [whole(512, tier) for tier in tiers])
    moves = victims(index, STORE, 1024, 0.0, EXACT)
    saved = [4.25 - 1.875, 4.75 - 0.75, 5.25 - 1.875]
    assert [(m.name, m.loss_s) for m in moves] == [
        (names[2], ONCE * saved[2]),
        (names[0], ONCE * saved[0] + ONCE * saved[1]),
    ]


def test_what_follows_in_the_same_tier_leaves_first_and_is_not_counted_twice():
    index = SegmentIndex(HALF_LIFE_S)
    names = chain_of(index, [whole(512, STORE)] * 3)
    moves = victims(index, STORE, 1536, 0.0, EXACT)
    saved = [4.0 + 0.25 * odd - 1.875 for odd in (1, 3, 5)]
    assert [(m.name, m.target) for m in moves] == [(n, GONE) for n in names[::-1]]
    assert [m.loss_s for m in moves] == [ONCE * each for each in saved[::-1]]


def test_at_ordinary_prices_a_prompt_leaves_in_the_order_of_the_design():
    index = SegmentIndex()
    kept = KV_BYTES // 4
    names = chain_of(index, [parted(kept, DEVICE, KV_BYTES - kept, DEVICE)] * 8)
    moves = pressed(index, ORDINARY, [DEVICE, HOST, STORE])
    back = names[::-1]
    device = [(n, part, HOST) for part in (RESIDUAL, DRAFT) for n in back]
    host = [(n, part, STORE) for n in back for part in (RESIDUAL, DRAFT)]
    store = [(n, part, GONE) for n in back for part in (RESIDUAL, DRAFT)]
    assert [(m.name, m.part, m.target) for m in moves] == [*device, *host, *store]


@pytest.mark.parametrize("share", [0.05, 0.25, 0.31, 0.5, 0.75])
def test_at_ordinary_prices_the_residual_leaves_the_device_first(share):
    kept = int(KV_BYTES * share)
    index = one(parted(kept, DEVICE, KV_BYTES - kept, DEVICE))
    assert moves_of(index, DEVICE, ORDINARY) == [("s0", RESIDUAL, HOST)]


def test_with_a_free_way_out_the_residual_still_leaves_first():
    index = one(parted(2048, DEVICE, 1024, DEVICE))
    free = replace(EXACT, link_out_s_per_byte=0.0)
    assert moves_of(index, DEVICE, free) == [("s0", RESIDUAL, HOST)]


def test_a_store_slower_than_computing_again_is_skipped():
    kept = KV_BYTES // 4
    content = parted(kept, HOST, KV_BYTES - kept, HOST)
    slow = replace(ORDINARY, store_s_per_byte=1 / 1e9)
    gone = [("s0", RESIDUAL, GONE), ("s0", DRAFT, GONE)]
    assert moves_of(one(content), HOST, slow) == gone
    assert moves_of(one(content), HOST, replace(slow, store_s_per_byte=inf)) == gone
    late = replace(ORDINARY, store_latency_s=1.0)
    assert moves_of(one(content), HOST, late) == gone


def test_what_the_store_has_leaves_the_host_before_what_it_has_not():
    """A fetch at 5 GB/s is half of a prefill: it goes although it was used last."""
    index = SegmentIndex()
    (nowhere,) = chain_of(index, [whole(KV_BYTES, HOST)], name="n", stored=False)
    (there,) = chain_of(index, [whole(KV_BYTES, HOST)], name="t", now=60.0)
    moves = moves_of(index, HOST, ORDINARY, now=60.0, nbytes=2 * KV_BYTES)
    assert moves == [(there, RESIDUAL, STORE), (nowhere, RESIDUAL, GONE)]
    index.note_stored(there, False)
    moves = moves_of(index, HOST, ORDINARY, now=60.0, nbytes=2 * KV_BYTES)
    assert moves == [(nowhere, RESIDUAL, GONE), (there, RESIDUAL, GONE)]


def test_a_slow_store_is_worth_it_far_into_a_long_prompt():
    index = SegmentIndex()
    slow = replace(ORDINARY, store_s_per_byte=1 / 1e9)
    chain_of(index, [whole(KV_BYTES, HOST, tokens=100_000)])
    last = "last"
    assert index.add(last, "s0", whole(KV_BYTES, HOST), 0.0)
    index.note_stored(last, True)
    # 512 tokens after 100,000: 0.02 s of dense layers, 0.07 s of attention.
    assert slow.prefill_s(100_000, 512) == pytest.approx(0.0923, abs=1e-4)
    assert moves_of(index, HOST, slow) == [(last, RESIDUAL, STORE)]


def test_a_host_slower_than_computing_again_is_skipped_with_the_store_below_it():
    content = parted(256, DEVICE, 1024, DEVICE)
    slow = replace(EXACT, link_in_s_per_byte=1.0)
    gone = [("s0", RESIDUAL, GONE), ("s0", DRAFT, GONE)]
    assert moves_of(one(content), DEVICE, slow) == gone
    assert moves_of(one(content), DEVICE, replace(slow, link_in_s_per_byte=inf)) == gone


def test_parts_elsewhere_go_with_the_segment_they_are_of_no_use_without():
    index = one(parted(256, DEVICE, 1024, STORE))
    moves = victims(index, STORE, 1, 0.0, EXACT)
    assert [(m.part, m.source, m.target) for m in moves] == [
        (RESIDUAL, STORE, GONE),
        (DRAFT, DEVICE, GONE),
    ]
    apply(index, moves)
    assert index.total(DEVICE).nbytes == index.total(STORE).nbytes == len(index) == 0


def test_a_cold_draft_part_leaves_before_a_hot_residual():
    index = SegmentIndex(HALF_LIFE_S)
    chain_of(index, [parted(256, DEVICE, 1024, HOST)], name="cold")
    chain_of(index, [parted(256, DEVICE, 1024, DEVICE)], name="hot", now=128.0)
    # (1 - e^-0.25) * 1.5 = 0.33 against (1 - e^-1) * 1 = 0.63 per byte of link time.
    assert moves_of(index, DEVICE, EXACT, now=128.0) == [("cold0", DRAFT, HOST)]
    # At the same time it is the other way round.
    index.touch(["cold0"], 128.0)
    index.touch(["hot0"], 128.0)
    assert moves_of(index, DEVICE, EXACT, now=128.0) == [("hot0", RESIDUAL, HOST)]


def test_a_segment_nobody_used_for_ages_still_goes_down_one_tier():
    index = one(whole(1024, DEVICE))
    (move,) = victims(index, DEVICE, 1, 1e9, EXACT)
    assert move.target is HOST
    assert 0 < move.loss_s < 1e-100


def test_of_equals_the_one_longest_here_leaves_first():
    index = SegmentIndex(HALF_LIFE_S)
    for name in "cab":
        chain_of(index, [whole(64, DEVICE)], name=name)
    moves = victims(index, DEVICE, 1 << 20, 0.0, EXACT)
    assert [m.name for m in moves] == ["c0", "a0", "b0"]
