"""Complements by segment: who holds them, what they take, which may go."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.complement import RawComplement
from vericache_sglang.memory.geometry import KVGeometry
from vericache_sglang.memory.host_pages import HostPagePool
from vericache_sglang.memory.segment_complements import SegmentComplements

GEOMETRY = KVGeometry(
    layers=2, kv_heads=2, head_dim=4, v_head_dim=6, element_bytes=4, page_size=1
)
NAMES = "abcd"


def slots_of(name):
    return NAMES.index(name) + 2


def bytes_of(name, kept=3):
    """Keys, values and positions of two layers of two heads, in pages of 96 bytes."""
    slots = slots_of(name)
    values = -(-2 * 2 * slots * 4 * 4 // 48) * 48  # begins with a whole value
    kept_at = -(-(values + 2 * 2 * slots * 6 * 4) // 64) * 64
    return -(-(kept_at + 2 * 2 * kept * 4) // 96) * 96


def opened(nbytes=1 << 16):
    """Return complements in host pages, and the pool of these."""
    page_pool = HostPagePool(nbytes, 96, pinned=False)

    def make(slots, kept):
        return RawComplement(GEOMETRY, slots, kept, torch.float32, page_pool)

    return SegmentComplements(make, RawComplement.free), page_pool


ACTS = st.tuples(
    st.sampled_from(["open", "open", "hold", "hold", "let_go", "let_go", "drop"]),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(ACTS, max_size=40))
def test_holders_and_bytes_are_counted(acts):
    complements, page_pool = opened()
    known = {}
    for act, names in acts:
        name = names[0]
        if act == "open" and name not in known:
            made = complements.open(name, slots_of(name), 3)
            assert complements.get(name) is made
            assert made.slots == slots_of(name)
            known[name] = 0
        elif act == "hold" and all(each in known for each in names):
            complements.hold(names)
            known |= {each: known[each] + 1 for each in names}
        elif act == "let_go" and all(known.get(each, 0) for each in names):
            complements.let_go(names)
            known |= {each: known[each] - 1 for each in names}
        elif act == "drop" and known.get(name, 1) == 0:
            complements.drop(name)
            del known[name]
        elif act != "let_go":
            with pytest.raises(InvariantError):
                refused(complements, act, names)
        assert len(complements) == len(known)
        assert complements.used_bytes == sum(map(bytes_of, known))
        loose = sum(bytes_of(each) for each, holders in known.items() if not holders)
        assert complements.evictable_bytes == loose
        for each in NAMES:
            assert (each in complements) is (each in known)
            assert complements.is_held(each) is (known.get(each, 0) > 0)
        complements.check([n for n, holders in known.items() for _ in range(holders)])
        page_pool.check()
        assert (page_pool.used_bytes > 0) is bool(known)


def refused(complements, act, names):
    """Ask for what cannot be."""
    if act == "open":
        complements.open(names[0], 2, 3)
    elif act == "drop":
        complements.drop(names[0])
    else:
        complements.hold(names)


def test_what_nobody_holds_cannot_be_let_go():
    complements, _ = opened()
    complements.open("a", 2, 3)
    for name in "ab":
        with pytest.raises(InvariantError, match=f"nobody holds .* segment {name}"):
            complements.let_go([name])


def test_without_room_nothing_is_there():
    complements, page_pool = opened(1 << 10)
    complements.open("a", 2, 3)
    before = page_pool.used_bytes
    with pytest.raises(TransferError, match="--vericache-host-gb"):
        complements.open("d", 100, 3)
    assert "d" not in complements
    assert complements.get("d") is None
    assert (page_pool.used_bytes, complements.used_bytes) == (before, bytes_of("a"))


def test_a_held_one_is_not_cleared():
    complements, page_pool = opened()
    complements.open("a", 2, 3)
    complements.hold(["a"])
    with pytest.raises(InvariantError, match="segment a may not be freed"):
        complements.clear()
    complements.let_go(["a"])
    complements.clear()
    assert (len(complements), complements.used_bytes, page_pool.used_bytes) == (0, 0, 0)


@pytest.mark.parametrize("referred", [[], ["a"], ["a", "a", "a"]])
def test_a_wrong_number_of_holders_is_noticed(referred):
    complements, _ = opened()
    complements.open("a", 2, 3)
    complements.hold(["a"])
    complements.hold(["a"])
    with pytest.raises(InvariantError, match=f"2 holders for {len(referred)} uses"):
        complements.check(referred)


def test_holders_of_the_wrong_segment_are_noticed():
    complements, _ = opened()
    complements.open("a", 2, 3)
    complements.open("b", 2, 3)
    complements.hold(["a"])
    with pytest.raises(InvariantError):
        complements.check(["b"])
