"""The host store keeps to its budget, and equal complements once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.compression.budget import Budget
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.host_store import HostStore
from vericache_sglang.kv.residual import RawResidual

SIZE = Budget(10, 3, 0, 0)
"""7 slots of complement, 3 exact tokens."""

DTYPES = [torch.float32, torch.bfloat16]


def new_pool(nbytes, dtype=torch.float32):
    """Pages of 5 keys, or 3 values, of two heads: 120 bytes, or 60."""
    return HostPagePool(nbytes, 30 * dtype.itemsize, pinned=False)


def new_store(budget, dtype=torch.float32):
    geometry = KVGeometry(
        layers=2,
        kv_heads=2,
        head_dim=3,
        v_head_dim=5,
        element_bytes=dtype.itemsize,
        page_size=1,
    )
    return HostStore(geometry, dtype, new_pool(budget, dtype))


def fill(residual, content):
    """Seal a complement whose bytes are a function of ``content``."""
    generator = torch.Generator().manual_seed(content)
    for name, tensor in residual.tensors.items():
        raw = torch.randint(0, 256, (tensor.nbytes,), generator=generator)
        made = raw.to(torch.uint8).view(tensor.dtype).view(tensor.shape)
        if name == "keys":
            made[0, 0, 0, 0] = torch.nan  # not equal to itself, its bits are
        tensor.write(made)
    for layer in range(residual.layers):
        residual.seal(layer)


@pytest.mark.parametrize(
    ("dtype", "residual", "swapped"),
    [
        # 2 layers of 2 heads, a slot holds 3 + 5 elements each, a position 4 bytes;
        # values begin with a whole one, positions at a multiple of 64.
        (torch.float32, (336, 560, 48), (240, 400)),
        (torch.bfloat16, (168, 280, 48), (120, 200)),
    ],
)
def test_the_budget_is_exact_to_the_page(dtype, residual, swapped):
    value, page = 10 * dtype.itemsize, 30 * dtype.itemsize
    keys, values, kept = residual
    kept_at = -(-(-(-keys // value) * value + values) // 64) * 64
    sizes = (kept_at + kept, -(-swapped[0] // value) * value + swapped[1])
    held = [-(-size // page) * page for size in sizes]
    store = new_store(sum(held), dtype)
    assert [store.residual_bytes(SIZE), store.swapped_bytes(5)] == held
    opened = store.open("a", SIZE)
    assert opened.nbytes == sum(residual)
    assert opened.held_bytes == store.used_bytes == held[0]
    assert store.fits(held[1])
    assert not store.fits(held[1] + 1)
    assert not store.fits_residual(SIZE)
    assert store.swap_out("a", 5).nbytes == sum(swapped)
    assert (store.free_bytes, store.fits(1)) == (0, False)
    assert store.budget_bytes == store.used_bytes == store.held_bytes


def test_over_the_budget_nothing_is_allocated():
    store = new_store(1080 - 1)
    for allocate in (lambda: store.open("a", SIZE), lambda: store.swap_out("a", 8)):
        with pytest.raises(TransferError, match="that --vericache-host-gb allows"):
            allocate()
    assert store.used_bytes == store.drop("a") == 0
    store.open("a", Budget(8, 2, 0, 0))
    store.check({"a"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_residuals_count_once(dtype):
    store = new_store(10**6, dtype)
    first, second = store.open("a", SIZE), store.open("b", SIZE)
    fill(first, 1)
    fill(second, 1)
    assert store.used_bytes == 2 * first.held_bytes
    assert store.group_of("a") != store.group_of("b")
    name = store.share("b")
    assert name == store.group_of("a") == store.group_of("b")
    assert store.residual("b") is store.residual("a") is first
    assert store.used_bytes == first.held_bytes
    assert store.share("b") == store.share("a") == name
    assert store.drop("a") == 0, "b still refers to it"
    assert store.residual("b") is first
    assert store.group_of("b") == name
    assert store.drop("b") == first.held_bytes
    assert store.used_bytes == 0


def test_a_freed_name_is_never_used_again():
    store = new_store(10**6)
    store.open("a", SIZE)
    name = store.group_of("a")
    store.drop("a")
    store.open("a", SIZE)
    assert store.group_of("a") != name


@pytest.mark.parametrize("part", ["keys", "values", "kept"])
def test_a_damaged_residual_is_not_shared(part):
    store = new_store(10**6)
    first, second = store.open("a", SIZE), store.open("b", SIZE)
    fill(first, 1)
    fill(second, 1)
    first.tensors[part].raw(0)[0][3] ^= 1
    assert store.share("b") == store.group_of("b") != store.group_of("a")
    assert store.residual("b") is second


def test_only_full_residuals_are_shared():
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
    store.swap_out("a", 4)
    with pytest.raises(InvariantError, match="a has a residual KV already"):
        store.open("a", SIZE)
    with pytest.raises(InvariantError, match="a is swapped out already"):
        store.swap_out("a", 4)
    with pytest.raises(InvariantError, match="b has no residual KV"):
        store.residual("b")
    assert store.swapped("b") is None
    assert store.drop_swapped("a") == store.swapped_bytes(4)
    assert store.drop_swapped("a") == 0
    assert store.swapped("a") is None
    assert store.drop("a") == store.residual_bytes(SIZE)


def test_the_dead_are_found():
    store = new_store(10**6)
    store.open("a", SIZE)
    store.swap_out("b", 4)
    store.check({"a", "b", "c"})
    with pytest.raises(InvariantError, match=r"dead requests \['b'\]"):
        store.check({"a"})
    with pytest.raises(InvariantError, match=r"dead requests \['a', 'b'\]"):
        store.check(set())


def test_others_of_the_arena_are_counted_too():
    page_pool = new_pool(10**5)
    store = HostStore(new_store(64).geometry, torch.float32, page_pool)
    store.open("a", SIZE)
    mine, other = store.held_bytes, page_pool.take(1000)
    assert store.used_bytes == mine + 1080
    store.check({"a"}, others=1080)
    with pytest.raises(
        InvariantError, match=f"{mine + 1080} bytes in use, {mine} held"
    ):
        store.check({"a"}, others=0)
    store.check({"a"})
    other.free()
    store.check({"a"}, others=0)


class Cache:
    """Pages of a pool, the oldest of which can be given up."""

    def __init__(self, page_pool, size, count):
        self.page_pool, self.asked = page_pool, []
        self.held = [page_pool.take(size) for _ in range(count)]

    def evict(self, nbytes):
        self.asked.append(nbytes)
        while nbytes > 0 and self.held:
            nbytes -= self.held[0].nbytes
            self.held.pop(0).free()


def test_the_evictor_is_asked_for_what_is_missing_before_a_refusal():
    page_pool = new_pool(4080)
    store = HostStore(new_store(64).geometry, torch.float32, page_pool)
    cache = Cache(page_pool, 480, 8)
    store.evictor = cache.evict
    assert store.fits(240)
    assert cache.asked == [], "nothing is asked while there is room"
    assert store.fits(1000)  # 1080 in pages, 240 are free
    assert cache.asked == [840]
    assert len(cache.held) == 6
    image = store.open("a", SIZE)
    assert image.held_bytes == 1080
    assert not store.fits(4080 + 1), "nothing is given up for what can never fit"
    assert cache.asked == [840]
    assert not store.fits(3000 + 1), "the image stays"
    assert cache.asked == [840, 3120 - 120, 3120 - 3000], "in the end all"
    assert not cache.held
    with pytest.raises(TransferError, match="that --vericache-host-gb allows"):
        store.swap_out("b", 60)


def test_geometry_and_dtype_agree():
    geometry = new_store(64).geometry
    with pytest.raises(InvariantError, match=r"4 bytes for a torch\.bfloat16"):
        HostStore(geometry, torch.bfloat16, new_pool(64))


def test_an_adopted_residual_is_somebody_else_s_memory():
    page_pool = new_pool(8192)
    store = HostStore(new_store(64).geometry, torch.float32, page_pool)
    foreign = RawResidual(store.geometry, 7, 3, torch.float32, page_pool)
    for rid in "ab":
        store.adopt(rid, "segments", foreign)
    with pytest.raises(InvariantError, match="a has a residual KV already"):
        store.adopt("a", "segments", foreign)
    assert store.residual("b") is foreign
    assert store.group_of("a") == store.group_of("b") == "segments"
    assert store.held_bytes == 0
    store.check("ab", others=foreign.held_bytes)
    assert store.drop("a") == store.drop("b") == 0
    store.check("", others=foreign.held_bytes)
    foreign.free()
    assert page_pool.used_bytes == 0


def test_a_shared_request_gives_its_own_bytes_back_to_the_arena():
    page_pool = new_pool(8192)
    store = HostStore(new_store(64).geometry, torch.float32, page_pool)
    own = [store.open(rid, SIZE) for rid in "ab"]
    for residual in own:
        fill(residual, 1)
    store.share("b")
    assert own[1].pages.freed
    assert not own[0].pages.freed
    with pytest.raises(InvariantError, match="freed"):
        own[1].keys.fill_(0)


class Model:
    """The store in four dictionaries: who has what content, in which group."""

    def __init__(self, store):
        self.store = store
        self.size = store.residual_bytes(SIZE)
        self.content, self.group, self.swapped = {}, {}, {}
        self.opened = 0

    @property
    def used(self):
        shared_once = len(set(self.group.values()))
        return self.size * shared_once + sum(self.swapped.values())

    def fits(self, amount):
        fits = self.store.fits(amount)
        assert fits == (self.used + amount <= self.store.budget_bytes)
        return fits

    def open(self, rid, number):
        if rid in self.content:
            return
        if not self.fits(self.size):
            with pytest.raises(TransferError):
                self.store.open(rid, SIZE)
            return
        fill(self.store.open(rid, SIZE), number)
        self.content[rid], self.group[rid] = number, self.opened
        self.opened += 1

    def swap_out(self, rid, number):
        amount = self.store.swapped_bytes(number)
        if rid not in self.swapped and self.fits(amount):
            self.store.swap_out(rid, number)
            self.swapped[rid] = amount

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
        for book in (self.content, self.group, self.swapped):
            book.pop(rid, None)
        assert self.store.drop(rid) == before - self.used

    def swap_in(self, rid, number):
        assert self.store.drop_swapped(rid) == self.swapped.pop(rid, 0)

    def compare(self):
        assert self.store.used_bytes == self.used
        for one in self.content:
            for other in self.content:
                together = self.store.group_of(one) == self.store.group_of(other)
                assert together == (self.group[one] == self.group[other])
        self.store.check(self.content.keys() | self.swapped.keys(), others=0)


STEP = st.tuples(
    st.sampled_from(
        [Model.open, Model.swap_out, Model.share, Model.drop, Model.swap_in]
    ),
    st.sampled_from("abcd"),
    st.integers(1, 3),
)


@given(st.lists(STEP, max_size=40))
def test_any_history_adds_up(steps):
    model = Model(new_store(4080))
    for act, rid, number in steps:
        act(model, rid, number)
        model.compare()
