"""Complements by segment: who holds them, what they take, which may go."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.residual import RawResidual
from vericache_sglang.prefix_cache.segment_residuals import SegmentResiduals

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
        return RawResidual(GEOMETRY, slots, kept, torch.float32, page_pool)

    return SegmentResiduals(make, RawResidual.free), page_pool


ACTS = st.tuples(
    st.sampled_from(["open", "open", "hold", "hold", "let_go", "let_go", "drop"]),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(ACTS, max_size=40))
def test_holders_and_bytes_are_counted(acts):
    residuals, page_pool = opened()
    known = {}
    for act, names in acts:
        name = names[0]
        if act == "open" and name not in known:
            made = residuals.open(name, slots_of(name), 3)
            assert residuals.get(name) is made
            assert made.slots == slots_of(name)
            known[name] = 0
        elif act == "hold" and all(each in known for each in names):
            residuals.hold(names)
            known |= {each: known[each] + 1 for each in names}
        elif act == "let_go" and all(known.get(each, 0) for each in names):
            residuals.let_go(names)
            known |= {each: known[each] - 1 for each in names}
        elif act == "drop" and known.get(name, 1) == 0:
            residuals.drop(name)
            del known[name]
        elif act != "let_go":
            with pytest.raises(InvariantError):
                refused(residuals, act, names)
        assert len(residuals) == len(known)
        assert residuals.used_bytes == sum(map(bytes_of, known))
        pending_max = sum(
            bytes_of(each) for each, holders in known.items() if not holders
        )
        assert residuals.evictable_bytes == pending_max
        for each in NAMES:
            assert (each in residuals) is (each in known)
            assert residuals.is_held(each) is (known.get(each, 0) > 0)
        residuals.check([n for n, holders in known.items() for _ in range(holders)])
        page_pool.check()
        assert (page_pool.used_bytes > 0) is bool(known)


def refused(residuals, act, names):
    """Ask for what cannot be."""
    if act == "open":
        residuals.open(names[0], 2, 3)
    elif act == "drop":
        residuals.drop(names[0])
    else:
        residuals.hold(names)


def test_what_nobody_holds_cannot_be_let_go():
    residuals, _ = opened()
    residuals.open("a", 2, 3)
    for name in "ab":
        with pytest.raises(InvariantError, match=f"nobody holds .* segment {name}"):
            residuals.let_go([name])


def test_without_room_nothing_is_there():
    residuals, page_pool = opened(1 << 10)
    residuals.open("a", 2, 3)
    before = page_pool.used_bytes
    with pytest.raises(TransferError, match="--vericache-host-gb"):
        residuals.open("d", 100, 3)
    assert "d" not in residuals
    assert residuals.get("d") is None
    assert (page_pool.used_bytes, residuals.used_bytes) == (before, bytes_of("a"))


def test_a_held_one_is_not_cleared():
    residuals, page_pool = opened()
    residuals.open("a", 2, 3)
    residuals.hold(["a"])
    with pytest.raises(InvariantError, match="segment a may not be freed"):
        residuals.clear()
    residuals.let_go(["a"])
    residuals.clear()
    assert (len(residuals), residuals.used_bytes, page_pool.used_bytes) == (0, 0, 0)


@pytest.mark.parametrize("referred", [[], ["a"], ["a", "a", "a"]])
def test_a_wrong_number_of_holders_is_noticed(referred):
    residuals, _ = opened()
    residuals.open("a", 2, 3)
    residuals.hold(["a"])
    residuals.hold(["a"])
    with pytest.raises(InvariantError, match=f"2 holders for {len(referred)} uses"):
        residuals.check(referred)


def test_holders_of_the_wrong_segment_are_noticed():
    residuals, _ = opened()
    residuals.open("a", 2, 3)
    residuals.open("b", 2, 3)
    residuals.hold(["a"])
    with pytest.raises(InvariantError):
        residuals.check(["b"])
