"""What each call of the index does, and what it refuses without changing anything."""

from copy import deepcopy

import pytest
from forest import HALF_LIFE_S, TOKENS, chain_of, matched, parted, whole

from vericache_sglang.errors import ConfigError, InvariantError
from vericache_sglang.prefix_cache.index import SegmentIndex, Total
from vericache_sglang.prefix_cache.segment import Part, Tier, Use

DEVICE, HOST, STORE, GONE = Tier


@pytest.fixture
def index():
    """Two prompts that share their first two segments: a0 a1 a2, and a0 a1 b0."""
    index = SegmentIndex(HALF_LIFE_S)
    names = chain_of(index, [parted(128, DEVICE, 384, HOST)] * 3, name="a")
    chain_of(index, [whole(512, STORE)], name="b", parent=names[1])
    return index


def state(index):
    totals = [index.total(tier) for tier in Tier]
    return (
        deepcopy(list(index.segments())),
        totals,
        [index.children(n) for n in ("a0", "a1", "x")],
    )


@pytest.mark.parametrize(
    "refused",
    [
        lambda index: index.add("c", "nowhere", whole(8, HOST), 1.0),
        lambda index: index.add("a2", "a0", parted(128, HOST, 384, HOST), 1.0),
        lambda index: index.add("a0", None, whole(8, HOST, tokens=511), 1.0),
        lambda index: index.add("c", "a0", whole(8, GONE), 1.0),
        lambda index: index.touch(["a0", "nowhere"], 1.0),
        lambda index: index.place("nowhere", Part.DRAFT, HOST),
        lambda index: index.place("b0", Part.DRAFT, HOST),
        lambda index: index.drop("nowhere"),
        lambda index: index.drop("a1"),
    ],
)
def test_what_is_refused_changes_nothing(index, refused):
    before = state(index)
    with pytest.raises(InvariantError):
        refused(index)
    assert state(index) == before
    index.check()


def test_totals_count_every_token_and_byte_where_it_is(index):
    assert index.total(DEVICE) == Total(3 * 128, 3 * 128)
    assert index.total(HOST) == Total(3 * 384, 3 * 384)
    assert index.total(STORE) == Total(512, 512)
    assert index.total(GONE) == Total(0, 0)
    assert sum(index.total(tier).tokens for tier in Tier) == 4 * TOKENS


def test_a_segment_knows_where_in_the_prompt_it_is(index):
    ends = [index.get(name).end for name in ("a0", "a1", "a2", "b0")]
    assert ends == [512, 1024, 1536, 1536]
    assert index.children("a1") == ("a2", "b0")
    assert index.get("nowhere") is None
    assert len(index) == 4
    assert "b0" in index


def test_a_match_ends_at_the_first_segment_that_cannot_be_restored(index):
    names = ["a0", "a1", "a2", "a3"]
    assert matched(index, names) == 3
    assert matched(index, names, 2) == 1
    assert (
        matched(index, names, 3) == matched(index, names, 4) == matched(index, []) == 0
    )
    assert matched(index, ["a0", "a1", "b0"]) == 3
    index.place("a1", Part.RESIDUAL, GONE)
    assert matched(index, names) == 1
    assert matched(index, names, 2) == 1


def test_adding_one_that_is_here_counts_a_use_and_keeps_its_place(index):
    assert not index.add("a0", None, parted(128, HOST, 384, DEVICE), HALF_LIFE_S)
    segment = index.get("a0")
    assert segment.content == parted(128, DEVICE, 384, HOST)
    assert (segment.uses, segment.last_use) == (1.5, HALF_LIFE_S)


@pytest.mark.parametrize("pinned", [False, True])
def test_another_compressor_replaces_only_what_nobody_pins(index, pinned):
    other = parted(64, DEVICE, 448, STORE, compressor="b")
    index.hold("r", {"a1": Use.ALL} if pinned else {})
    assert index.add("a1", "a0", other, 0.0) is not pinned
    assert (index.get("a1").content == other) is not pinned
    assert index.get("a1").uses == 2.0
    assert index.children("a1") == ("a2", "b0")
    index.check()


def test_what_lost_a_part_is_replaced_whole(index):
    index.place("a1", Part.DRAFT, GONE)
    assert index.total(GONE) == Total(128, 128)
    assert index.add("a1", "a0", parted(100, STORE, 412, STORE), 0.0)
    assert index.get("a1").content == parted(100, STORE, 412, STORE)
    assert index.total(GONE) == Total(0, 0)
    index.check()


def test_pinned_parts_stay_where_they_are(index):
    index.hold("r", {"a0": Use.ALL, "a1": Use.ALL})
    index.hold("q", {"a0": Use.DRAFT})
    for tier in (HOST, STORE, GONE):
        with pytest.raises(InvariantError, match=r"used by \['r', 'q'\]"):
            index.place("a0", Part.DRAFT, tier)
    index.place("a0", Part.DRAFT, DEVICE)
    with pytest.raises(InvariantError, match=r"used by \['r', 'q'\]"):
        index.drop("a0", strand=True)
    assert index.release("r") == ["a0", "a1"]
    assert index.release("r") == []
    index.place("a0", Part.RESIDUAL, STORE)
    with pytest.raises(InvariantError, match=r"used by \['q'\]"):
        index.place("a0", Part.DRAFT, STORE)
    index.release("q")
    index.place("a0", Part.DRAFT, STORE)
    assert index.get("a0").content.draft.tier is STORE


def test_what_is_gone_comes_back_only_by_being_added(index):
    index.place("a2", Part.DRAFT, GONE)
    with pytest.raises(InvariantError, match="gone for good"):
        index.place("a2", Part.DRAFT, HOST)
    index.place("a2", Part.RESIDUAL, GONE)
    assert "a2" not in index
    assert index.total(GONE) == Total(0, 0)
    assert index.children("a1") == ("b0",)


def test_stranded_segments_are_matched_again_once_the_one_before_is_back(index):
    index.drop("a1", strand=True)
    assert matched(index, ["a0", "a1", "a2"]) == 1
    assert index.children("a1") == ("a2", "b0")
    index.check()
    with pytest.raises(InvariantError, match="starts at 1024"):
        index.add("a1", None, whole(512, HOST), 1.0)
    assert index.add("a1", "a0", whole(512, HOST), 1.0)
    assert matched(index, ["a0", "a1", "a2"]) == 3
    index.check()


def test_a_clock_that_went_back_loses_no_use(index):
    index.touch(["a0"], 100.0)
    uses = index.get("a0").uses
    index.touch(["a0"], 50.0)
    assert index.get("a0").uses == uses + 1
    assert index.get("a0").last_use == 100.0


@pytest.mark.parametrize("half_life_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_half_life_that_cannot_be_is_refused(half_life_s):
    with pytest.raises(ConfigError, match="half_life_s"):
        SegmentIndex(half_life_s)


def test_check_finds_a_total_and_a_link_that_are_off(index):
    index._totals[HOST][1] += 1
    with pytest.raises(InvariantError, match="totals"):
        index.check()
    index._totals[HOST][1] -= 1
    del index._children["a1"]["a2"]
    with pytest.raises(InvariantError, match="links"):
        index.check()
