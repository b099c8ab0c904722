"""The host store keeps to its budget, and equal complements once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.compression.budget import Budget
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.geometry import KVGeometry
from vericache_sglang.memory.host_store import HostStore

SIZE = Budget(10, 3, 0, 0)
"""7 slots of complement, 3 exact tokens."""

DTYPES = [torch.float32, torch.bfloat16]


def new_store(budget, dtype=torch.float32):
    geometry = KVGeometry(
        layers=2,
        kv_heads=2,
        head_dim=3,
        v_head_dim=5,
        element_bytes=dtype.itemsize,
        page_size=1,
    )
    return HostStore(geometry, dtype, budget)


def fill(complement, content):
    """Seal a complement whose bytes are a function of ``content``."""
    generator = torch.Generator().manual_seed(content)
    for tensor in (complement.keys, complement.values, complement.kept):
        raw = torch.randint(0, 256, (tensor.nbytes,), generator=generator)
        tensor.view(torch.uint8).view(-1).copy_(raw)
    complement.keys[0, 0, 0, 0] = torch.nan  # not equal to itself, its bits are
    for layer in range(complement.layers):
        complement.seal(layer)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_budget_is_exact_to_the_byte(dtype, size):
    # 2 layers of 2 heads: a slot holds 3 + 5 elements each, a position 4 bytes.
    complement, parked = 7 * 2 * 2 * 8 * size + 2 * 2 * 3 * 4, 5 * 2 * 2 * 8 * size
    store = new_store(complement + parked, dtype)
    assert store.complement_bytes(SIZE) == complement
    assert store.parked_bytes(5) == parked
    assert store.open("a", SIZE).nbytes == store.used_bytes == complement
    assert store.fits(parked)
    assert not store.fits(parked + 1)
    assert not store.fits_complement(SIZE)
    assert store.park("a", 5).nbytes == parked
    assert (store.free_bytes, store.fits(0), store.fits(1)) == (0, True, False)


def test_over_the_budget_nothing_is_allocated():
    store = new_store(7 * 2 * 2 * 8 * 4 + 2 * 2 * 3 * 4 - 1)
    for allocate in (lambda: store.open("a", SIZE), lambda: store.park("a", 8)):
        with pytest.raises(TransferError, match="that --vericache-host-gb allows"):
            allocate()
    assert store.used_bytes == store.drop("a") == 0
    store.open("a", Budget(9, 2, 0, 0))
    store.check({"a"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_complements_count_once(dtype):
    store = new_store(10**6, dtype)
    first, second = store.open("a", SIZE), store.open("b", SIZE)
    fill(first, 1)
    fill(second, 1)
    assert store.used_bytes == 2 * first.nbytes
    assert store.group_of("a") != store.group_of("b")
    name = store.share("b")
    assert name == store.group_of("a") == store.group_of("b")
    assert store.complement("b") is store.complement("a") is first
    assert store.used_bytes == first.nbytes
    assert store.share("b") == store.share("a") == name
    assert store.drop("a") == 0, "b still refers to it"
    assert store.complement("b") is first
    assert store.group_of("b") == name
    assert store.drop("b") == first.nbytes
    assert store.used_bytes == 0


def test_a_freed_name_is_never_used_again():
    store = new_store(10**6)
    store.open("a", SIZE)
    name = store.group_of("a")
    store.drop("a")
    store.open("a", SIZE)
    assert store.group_of("a") != name


@pytest.mark.parametrize("part", ["keys", "values", "kept"])
def test_a_damaged_complement_is_not_shared(part):
    store = new_store(10**6)
    first, second = store.open("a", SIZE), store.open("b", SIZE)
    fill(first, 1)
    fill(second, 1)
    getattr(first, part).view(torch.uint8).view(-1)[3] ^= 1
    assert store.share("b") == store.group_of("b") != store.group_of("a")
    assert store.complement("b") is second


def test_only_full_complements_are_shared():
    store = new_store(10**6)
    fill(store.open("a", SIZE), 1)
    unfinished = store.open("b", SIZE)
    with pytest.raises(InvariantError, match="b is shared before it is full"):
        store.share("b")
    fill(unfinished, 1)
    blank = store.open("c", SIZE)
    assert not blank.sealed
    assert store.share("b") == store.group_of("a")


def test_a_request_holds_one_of_each():
    store = new_store(10**6)
    store.open("a", SIZE)
    store.park("a", 4)
    with pytest.raises(InvariantError, match="a has a complement already"):
        store.open("a", SIZE)
    with pytest.raises(InvariantError, match="a is parked already"):
        store.park("a", 4)
    with pytest.raises(InvariantError, match="b has no complement"):
        store.complement("b")
    assert store.parked("b") is None
    assert store.drop_parked("a") == store.parked_bytes(4)
    assert store.drop_parked("a") == 0
    assert store.parked("a") is None
    assert store.drop("a") == store.complement_bytes(SIZE)


def test_the_dead_are_found():
    store = new_store(10**6)
    store.open("a", SIZE)
    store.park("b", 4)
    store.check({"a", "b", "c"})
    with pytest.raises(InvariantError, match=r"dead requests \['b'\]"):
        store.check({"a"})
    with pytest.raises(InvariantError, match=r"dead requests \['a', 'b'\]"):
        store.check(set())


def test_geometry_and_dtype_agree():
    geometry = new_store(1).geometry
    with pytest.raises(InvariantError, match=r"4 bytes for a torch\.bfloat16"):
        HostStore(geometry, torch.bfloat16, 1)


class Model:
    """The store in four dictionaries: who has what content, in which group."""

    def __init__(self, store):
        self.store = store
        self.size = store.complement_bytes(SIZE)
        self.content, self.group, self.parked = {}, {}, {}
        self.opened = 0

    @property
    def used(self):
        shared_once = len(set(self.group.values()))
        return self.size * shared_once + sum(self.parked.values())

    def open(self, rid, number):
        if rid in self.content:
            return
        if self.used + self.size > self.store.budget_bytes:
            with pytest.raises(TransferError):
                self.store.open(rid, SIZE)
            return
        fill(self.store.open(rid, SIZE), number)
        self.content[rid], self.group[rid] = number, self.opened
        self.opened += 1

    def park(self, rid, number):
        amount = self.store.parked_bytes(number)
        if rid not in self.parked and self.used + amount <= self.store.budget_bytes:
            self.store.park(rid, number)
            self.parked[rid] = amount

    def share(self, rid, number):
        if rid not in self.content:
            return
        self.store.share(rid)
        twins = {g for r, g in self.group.items() if self.equal(r, rid)}
        if twins:
            self.group[rid] = min(twins)

    def equal(self, one, other):
        same = self.content[one] == self.content[other]
        return same and self.group[one] != self.group[other]

    def drop(self, rid, number):
        before = self.used
        for book in (self.content, self.group, self.parked):
            book.pop(rid, None)
        assert self.store.drop(rid) == before - self.used

    def unpark(self, rid, number):
        assert self.store.drop_parked(rid) == self.parked.pop(rid, 0)

    def compare(self):
        assert self.store.used_bytes == self.used
        for one in self.content:
            for other in self.content:
                together = self.store.group_of(one) == self.store.group_of(other)
                assert together == (self.group[one] == self.group[other])
        self.store.check(self.content.keys() | self.parked.keys())


STEP = st.tuples(
    st.sampled_from([Model.open, Model.park, Model.share, Model.drop, Model.unpark]),
    st.sampled_from("abcd"),
    st.integers(1, 3),
)


@given(st.lists(STEP, max_size=40))
def test_any_history_adds_up(steps):
    model = Model(new_store(4000))
    for act, rid, number in steps:
        act(model, rid, number)
        model.compare()
