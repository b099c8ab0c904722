"""The host store keeps to its budget, and equal complements once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.compression.budget import Budget
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.arena import Arena
from vericache_sglang.memory.complement import RawComplement
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
    return HostStore(geometry, dtype, Arena(budget, pinned=False))


def fill(complement, content):
    """Seal a complement whose bytes are a function of ``content``."""
    generator = torch.Generator().manual_seed(content)
    for tensor in (complement.keys, complement.values, complement.kept):
        raw = torch.randint(0, 256, (tensor.nbytes,), generator=generator)
        tensor.view(torch.uint8).view(-1).copy_(raw)
    complement.keys[0, 0, 0, 0] = torch.nan  # not equal to itself, its bits are
    for layer in range(complement.layers):
        complement.seal(layer)


@pytest.mark.parametrize(
    ("dtype", "complement", "parked"),
    [
        # 2 layers of 2 heads, a slot holds 3 + 5 elements each, a position 4 bytes;
        # every tensor takes whole grains of 64 bytes.
        (torch.float32, (336, 560, 48), (240, 400)),
        (torch.bfloat16, (168, 280, 48), (120, 200)),
    ],
)
def test_the_budget_is_exact_to_the_grain(dtype, complement, parked):
    held = [
        sum(-(-size // 64) * 64 for size in sizes) for sizes in (complement, parked)
    ]
    store = new_store(sum(held), dtype)
    assert [store.complement_bytes(SIZE), store.parked_bytes(5)] == held
    opened = store.open("a", SIZE)
    assert opened.nbytes == sum(complement)
    assert opened.held_bytes == store.used_bytes == held[0]
    assert store.fits(held[1])
    assert not store.fits(held[1] + 1)
    assert not store.fits_complement(SIZE)
    assert store.park("a", 5).nbytes == sum(parked)
    assert (store.free_bytes, store.fits(1)) == (0, False)
    assert store.budget_bytes == store.used_bytes == store.held_bytes


def test_over_the_budget_nothing_is_allocated():
    store = new_store(384 + 576 + 64 - 1)
    for allocate in (lambda: store.open("a", SIZE), lambda: store.park("a", 8)):
        with pytest.raises(TransferError, match="that --vericache-host-gb allows"):
            allocate()
    assert store.used_bytes == store.drop("a") == 0
    store.open("a", Budget(8, 2, 0, 0))
    store.check({"a"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_complements_count_once(dtype):
    store = new_store(10**6, dtype)
    first, second = store.open("a", SIZE), store.open("b", SIZE)
    fill(first, 1)
    fill(second, 1)
    assert store.used_bytes == 2 * first.held_bytes
    assert store.group_of("a") != store.group_of("b")
    name = store.share("b")
    assert name == store.group_of("a") == store.group_of("b")
    assert store.complement("b") is store.complement("a") is first
    assert store.used_bytes == first.held_bytes
    assert store.share("b") == store.share("a") == name
    assert store.drop("a") == 0, "b still refers to it"
    assert store.complement("b") is first
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


def test_others_of_the_arena_are_counted_too():
    arena = Arena(10**5, pinned=False)
    store = HostStore(new_store(64).geometry, torch.float32, arena)
    store.open("a", SIZE)
    mine, other = store.held_bytes, arena.take(1000)
    assert store.used_bytes == mine + 1024
    store.check({"a"}, others=1024)
    with pytest.raises(
        InvariantError, match=f"{mine + 1024} bytes in use, {mine} held"
    ):
        store.check({"a"}, others=0)
    store.check({"a"})
    arena.give(other)
    store.check({"a"}, others=0)


def test_others_are_moved_out_of_the_way_and_images_never():
    arena = Arena(8192, pinned=False)
    store = HostStore(new_store(64).geometry, torch.float32, arena)
    others = [arena.take(1024) for _ in range(8)]
    for i, extent in enumerate(others):
        extent.view(torch.uint8, (1024,)).fill_(i)
    arena.give(others[1])
    arena.give(others[4])
    image = store.park("a", 12)  # 576 + 960 bytes, which lay apart
    before = image.keys.data_ptr()
    image.keys.view(torch.uint8).fill_(77)
    arena.give(others[0])
    arena.give(others[6])
    assert arena.free_bytes == 512 + 2048
    assert store.fits(1536)
    assert image.keys.data_ptr() == before
    assert image.keys.view(torch.uint8).eq(77).all()
    for i in (2, 3, 5, 7):
        assert others[i].view(torch.uint8, (1024,)).eq(i).all()


class Cache:
    """Extents of an arena, the oldest of which can be given up."""

    def __init__(self, arena, size, count):
        self.arena, self.asked = arena, []
        self.held = [arena.take(size) for _ in range(count)]

    def evict(self, nbytes):
        self.asked.append(nbytes)
        while nbytes > 0 and self.held:
            nbytes -= self.held[0].size
            self.arena.give(self.held.pop(0))


def test_the_evictor_is_asked_for_what_is_missing_before_a_refusal():
    arena = Arena(4096, pinned=False)
    store = HostStore(new_store(64).geometry, torch.float32, arena)
    cache = Cache(arena, 512, 7)
    store.evictor = cache.evict
    assert store.fits(512)
    assert cache.asked == [], "nobody is asked while there is room"
    assert store.fits(1000)  # 1024 in grains, 512 are free, 128 are spare
    assert cache.asked == [640]
    assert len(cache.held) == 5
    store.open("a", SIZE)
    assert not store.fits(4096 + 64), "nothing is given up for what can never fit"
    assert cache.asked == [640]
    assert not store.fits(3072 + 64), "the image stays"
    assert cache.asked == [640, 3136 + 128 - 512, 3136 + 128 - 3072], "in the end all"
    assert not cache.held
    with pytest.raises(TransferError, match="that --vericache-host-gb allows"):
        store.park("b", 40)


@pytest.mark.parametrize(
    ("walls", "free", "asked"),
    [
        ((256, 256, 256, 256, 512, 1024, 1536), 1024, 128),  # for the spare bytes
        ((256, 256, 256, 256, 256, 256, 512, 1024, 1024), 1280, 1024),
    ],
)
def test_what_lies_between_images_is_given_up_for_one_piece(walls, free, asked):
    arena = Arena(4096, pinned=False)
    store = HostStore(new_store(64).geometry, torch.float32, arena)
    for gap in [arena.take(size, held=True) for size in walls][1::2]:
        gap.release()
        arena.give(gap)
    cache = Cache(arena, 512, 1)
    store.evictor = cache.evict
    # Free are pieces of 256, and 512 beside what the cache has; nothing can be moved.
    assert arena.free_bytes == free
    assert store.fits(512)
    assert cache.asked == []
    assert store.fits(1024)
    assert cache.asked == [asked]


def test_geometry_and_dtype_agree():
    geometry = new_store(64).geometry
    with pytest.raises(InvariantError, match=r"4 bytes for a torch\.bfloat16"):
        HostStore(geometry, torch.bfloat16, Arena(64, pinned=False))


def test_an_adopted_complement_is_somebody_else_s_memory():
    arena = Arena(8192, pinned=False)
    store = HostStore(new_store(64).geometry, torch.float32, arena)
    foreign = RawComplement(store.geometry, 7, 3, torch.float32, arena)
    for rid in "ab":
        store.adopt(rid, "segments", foreign)
    with pytest.raises(InvariantError, match="a has a complement already"):
        store.adopt("a", "segments", foreign)
    assert store.complement("b") is foreign
    assert store.group_of("a") == store.group_of("b") == "segments"
    assert store.held_bytes == 0
    store.check("ab", others=foreign.held_bytes)
    assert store.drop("a") == store.drop("b") == 0
    store.check("", others=foreign.held_bytes)
    foreign.free()
    assert arena.used_bytes == 0


def test_a_shared_request_gives_its_own_bytes_back_to_the_arena():
    arena = Arena(8192, pinned=False)
    store = HostStore(new_store(64).geometry, torch.float32, arena)
    own = [store.open(rid, SIZE) for rid in "ab"]
    for complement in own:
        fill(complement, 1)
    store.share("b")
    assert own[1].extent.given
    assert not own[0].extent.given
    with pytest.raises(InvariantError, match="given back"):
        own[1].keys.fill_(0)


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

    def fits(self, amount):
        """Nothing fits that exceeds the budget; all the rest where nothing is held."""
        fits = self.store.fits(amount)
        within = self.used + amount <= self.store.budget_bytes
        assert within if fits else self.used or not within
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

    def park(self, rid, number):
        amount = self.store.parked_bytes(number)
        if rid not in self.parked and self.fits(amount):
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
        self.store.check(self.content.keys() | self.parked.keys(), others=0)


STEP = st.tuples(
    st.sampled_from([Model.open, Model.park, Model.share, Model.drop, Model.unpark]),
    st.sampled_from("abcd"),
    st.integers(1, 3),
)


@given(st.lists(STEP, max_size=40))
@settings(deadline=None, max_examples=60)
def test_any_history_adds_up(steps):
    model = Model(new_store(4000))
    for act, rid, number in steps:
        act(model, rid, number)
        model.compare()
