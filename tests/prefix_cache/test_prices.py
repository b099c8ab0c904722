"""Prices in exact numbers, their bounds, and what the chance of a reuse stands for."""

import random
from dataclasses import replace
from math import exp, inf, log, nan

import pytest
from forest import EXACT, parted, whole
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import ConfigError
from vericache_sglang.prefix_cache.index import SegmentIndex
from vericache_sglang.prefix_cache.restore_costs import LEAST_CHANCE, reuse_chance
from vericache_sglang.prefix_cache.savings import Branches
from vericache_sglang.prefix_cache.segment import Part, Tier


def restore_s(content, lost=()):
    """Return the seconds of loading a segment, as eviction prices it."""
    index = SegmentIndex()
    index.add("a", None, content, 0.0)
    for part in lost:
        index.place("a", part, Tier.GONE)
    return float(Branches(index, Tier.DEVICE, 0.0, EXACT)._restore_s()[0])


@pytest.mark.parametrize(
    ("tier", "passing", "staying"),
    [
        (Tier.DEVICE, 0.0, 0.0),
        (Tier.HOST, 2.0, 3.0),
        (Tier.STORE, 0.125 + 4.0 + 2.0, 0.125 + 4.0 + 3.0),
    ],
)
def test_fetching_2048_bytes_takes(tier, passing, staying):
    assert restore_s(parted(1, Tier.DEVICE, 2048, tier)) == passing
    assert restore_s(parted(2048, tier, 1, Tier.DEVICE)) == staying
    assert restore_s(whole(2048, tier)) == staying


def test_a_residual_passes_while_draft_parts_and_whole_segments_stay():
    assert restore_s(parted(2048, Tier.HOST, 1024, Tier.HOST)) == 3.0 + 1.0
    both = restore_s(parted(512, Tier.STORE, 1024, Tier.STORE))
    assert both == (0.125 + 1.0 + 0.75) + (0.125 + 2.0 + 1.0)
    assert restore_s(parted(512, Tier.HOST, 1024, Tier.DEVICE), [Part.DRAFT]) == inf


def test_savings_are_the_prefill_less_the_restore():
    index = SegmentIndex()
    index.add("a", None, whole(2048, Tier.HOST), 0.0)
    index.add("b", "a", whole(2048, Tier.HOST), 0.0)
    found = Branches(index, Tier.HOST, 0.0, EXACT)
    last, _ = (found.own_s / found.chance).tolist()
    assert last == pytest.approx(4.0 + 0.75 - 3.0)


@given(st.integers(0, 1 << 20), st.integers(1, 4096), st.integers(1, 4096))
def test_a_prefill_in_two_pieces_takes_as_long_as_in_one(start, first, second):
    pieces = EXACT.prefill_s(start, first) + EXACT.prefill_s(start + first, second)
    assert pieces == EXACT.prefill_s(start, first + second)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("link_in_s_per_byte", -1e-12),
        ("link_out_s_per_byte", nan),
        ("store_latency_s", -1.0),
        ("store_s_per_byte", nan),
        ("prefill_s_per_token", inf),
        ("prefill_s_per_square", inf),
    ],
)
def test_a_price_that_cannot_be_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        replace(EXACT, **{field: value})


def test_a_missing_store_is_an_infinite_price():
    _, passing, staying = replace(EXACT, store_s_per_byte=inf).by_tier
    assert passing[Tier.STORE] == staying[Tier.STORE] == inf


def test_the_chance_of_a_reuse_grows_with_the_count_and_is_never_nothing():
    assert reuse_chance(1.0) == pytest.approx(1 - exp(-1.0), rel=1e-15)
    assert reuse_chance(0.0) == reuse_chance(1e-300) == LEAST_CHANCE
    assert reuse_chance(1e6) == 1.0
    assert reuse_chance(1e-9) == pytest.approx(1e-9, rel=1e-6)


def test_the_chance_is_that_of_a_poisson_stream_with_the_mean_count():
    # 40,000 uses at random, 0.8 per mean life; the count is looked at before each.
    rng, half_life, rate = random.Random(4), 10.0, 0.8 * log(2) / 10.0
    now, count, counts, soon = 0.0, 0.0, 0.0, 0
    for _ in range(40_000):
        wait = rng.expovariate(rate)
        soon += wait < half_life / log(2)
        now += wait
        count *= 0.5 ** (wait / half_life)
        counts += count
        count += 1
    assert counts / 40_000 == pytest.approx(0.8, rel=0.02)
    assert reuse_chance(0.8) == pytest.approx(soon / 40_000, rel=0.02)
