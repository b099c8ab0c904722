"""What a name keeps comes back bit for bit, or not at all."""

import logging

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.arena import Arena
from vericache_sglang.memory.segment_pool import SegmentPool

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32),
    *(torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64),
]


def new_pool(nbytes=1 << 16):
    return SegmentPool(Arena(nbytes, pinned=False))


def bits(tensor):
    """A tensor's bytes in C order, element by element."""
    flat = tensor.contiguous().view(-1) if tensor.dim() else tensor.reshape(1)
    return bytes(flat.view(torch.uint8).tolist())


def random_bits(shape, dtype, seed):
    """Any bits, NaN payloads included; of truth values the two there are."""
    generator = torch.Generator().manual_seed(seed)
    count = dtype.itemsize
    for size in shape:
        count *= size
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    return raw.view(dtype).view(shape)


def segment(seed, tokens=8):
    """A draft part as a server keeps it: entries, positions, codes."""
    return {
        "keys": random_bits((2, tokens, 2, 3), torch.bfloat16, seed),
        "values": random_bits((2, tokens, 2, 5), torch.bfloat16, seed + 1),
        "kept": torch.arange(seed, seed + tokens, dtype=torch.int32),
        "codes": random_bits((tokens, 7), torch.uint8, seed + 2),
    }


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for field, tensor in wanted.items():
        other = found[field]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert bits(other) == bits(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (7,)], ids=str)
def test_any_dtype_and_shape_comes_back_bit_for_bit(dtype, shape):
    pool, tensors = new_pool(), {"x": random_bits(shape, dtype, 3)}
    assert pool.put("a", tensors)
    same(pool.get("a"), tensors)


def test_a_nan_keeps_its_payload():
    raw = torch.tensor([0x7F81, 0x7FC1, 0xFF8F - 2**16, 0x7FFF], dtype=torch.int16)
    tensors = {"x": raw.view(torch.bfloat16), "turned": torch.empty(0)}
    tensors["turned"] = raw.repeat(3, 1).view(torch.bfloat16).t()
    pool = new_pool()
    pool.put("a", tensors)
    found = pool.get("a")
    assert found["x"].view(torch.int16).tolist() == raw.tolist()
    assert found["turned"].view(torch.int16)[:, 2].tolist() == raw.tolist()


def test_strides_are_followed():
    whole = torch.arange(60, dtype=torch.float32).view(5, 4, 3)
    tensors = {"t": whole.transpose(0, 2), "s": whole[::2, 1:3], "e": whole[:, :1, :1]}
    tensors["e"] = tensors["e"].expand(5, 4, 3)
    pool = new_pool()
    pool.put("a", tensors)
    same(pool.get("a"), tensors)


def test_what_is_kept_is_a_copy():
    pool, tensors = new_pool(), segment(1)
    pool.put("a", tensors)
    wanted = {field: tensor.clone() for field, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.view(torch.uint8).zero_()
    same(pool.get("a"), wanted)
    assert pool.get("b") is None
    assert ("a" in pool, "b" in pool, 3 in pool) == (True, False, False)


def test_bytes_are_counted_in_grains():
    pool, tensors = new_pool(), segment(1)
    # keys 192, values 320 -> 320, kept 32 -> 64, codes 56 -> 64 bytes.
    assert pool.bytes_for(tensors) == 192 + 320 + 64 + 64
    assert pool.room_for(1 << 16)
    assert not pool.room_for((1 << 16) + 1)
    pool.put("a", tensors)
    pool.put("empty", {})
    assert (pool.nbytes("a"), pool.nbytes("empty")) == (640, 64)
    assert (pool.used_bytes, pool.evictable_bytes) == (704, 704)
    pool.pin("a")
    assert (pool.used_bytes, pool.evictable_bytes) == (704, 64)
    pool.unpin("a")
    assert pool.names() == ["a", "empty"]
    assert pool.get("empty") == {}
    assert (pool.drop("a"), pool.drop("a"), pool.used_bytes) == (640, 0, 64)


def test_without_room_nothing_changes():
    pool = new_pool(2 * 640)
    pool.put("a", segment(1))
    pool.put("b", segment(2))
    assert not pool.put("c", segment(3))
    assert not pool.put("a", segment(4)), "old and new one do not fit together"
    same(pool.get("a"), segment(1))
    assert pool.names() == ["a", "b"]
    pool.drop("b")
    assert pool.put("a", segment(4))
    same(pool.get("a"), segment(4))
    assert pool.used_bytes == 640
    pool.check()


def test_a_tensor_that_cannot_be_read_takes_nothing():
    pool = new_pool()
    pool.put("a", segment(1))
    with pytest.raises(NotImplementedError):
        pool.put("a", {"x": torch.empty(4, device="meta")})
    same(pool.get("a"), segment(1))
    assert pool._arena.used_bytes == pool.used_bytes == 640
    pool.check()


def test_a_pinned_name_stays_where_it_is():
    pool = new_pool(4 * 640)
    for i, name in enumerate("abcd"):
        pool.put(name, segment(i))
    pool.pin("c")
    pool.pin("c")
    views = pool.get("c")
    for act in (pool.drop, lambda name: pool.put(name, segment(9))):
        with pytest.raises(InvariantError, match=r"segment c is .* pinned"):
            act("c")
    pool.drop("a")
    pool.drop("d")
    assert pool.room_for(2 * 640), "b makes room"
    pool.drop("b")
    assert not pool.room_for(3 * 640), "it lies between what is free"
    assert pool.put("e", segment(5, tokens=16))
    same(views, segment(2))
    same(pool.get("c"), segment(2))
    pool.unpin("c")
    with pytest.raises(InvariantError, match="segment c is dropped"):
        pool.drop("c")
    pool.unpin("c")
    assert pool.drop("c") == 640
    pool.check()


def test_pins_are_counted_and_names_are_known():
    pool = new_pool()
    for act in (pool.pin, pool.unpin, pool.nbytes):
        with pytest.raises(InvariantError, match="segment a is not in host memory"):
            act("a")
    pool.put("a", segment(1))
    with pytest.raises(InvariantError, match="unpinned more often than pinned"):
        pool.unpin("a")


@given(st.integers(0, 10**6), st.integers(0, 7))
@settings(deadline=None, max_examples=60)
def test_one_flipped_bit_is_noticed_counted_and_not_returned(where, bit):
    pool = new_pool()
    for i, name in enumerate("abc"):
        pool.put(name, segment(i))
    held = [tensor.view(-1).view(torch.uint8) for tensor in pool.get("b").values()]
    where %= sum(len(raw) for raw in held)
    for raw in held:
        if where < len(raw):
            raw[where] ^= 1 << bit
            break
        where -= len(raw)
    assert pool.get("b") is None
    assert pool.checksum_failures == 1
    assert pool.names() == ["a", "c"]
    assert pool.used_bytes == 2 * 640
    assert pool.get("b") is None
    assert pool.checksum_failures == 1, "it is gone, not damaged again"
    same(pool.get("a"), segment(0))
    same(pool.get("c"), segment(2))
    pool.check()


def test_damage_is_warned_of_once_and_a_pinned_one_goes_with_its_last_pin(caplog):
    pool = new_pool()
    pool.put("a", segment(1))
    pool.pin("a")
    pool.pin("a")
    pool.get("a")["kept"][0] += 1
    with caplog.at_level(logging.WARNING):
        assert [pool.get("a") for _ in range(3)] == [None, None, None]
    assert [r.message for r in caplog.records] == [
        "VeriCache: segment a was damaged in host memory"
    ]
    assert pool.checksum_failures == 1
    assert "a" not in pool
    pool.unpin("a")
    assert pool.used_bytes == 640, "a copy may still read it"
    pool.unpin("a")
    assert (pool.used_bytes, pool.names()) == (0, [])
    assert pool.put("a", segment(2))
    same(pool.get("a"), segment(2))


def test_the_checksum_is_xxh3_of_names_dtypes_shapes_and_bytes():
    pool = new_pool()
    pool.put("a", {"b": torch.tensor([[1, 2]], dtype=torch.int16), "a": torch.ones(())})
    expected = xxhash.xxh3_64(
        b"('a', 'torch.float32', ())"
        b"\x00\x00\x80\x3f"
        b"('b', 'torch.int16', (1, 2))"
        b"\x01\x00\x02\x00"
    )
    assert pool._entries["a"].checksum == expected.intdigest()
    pool._entries["a"].checksum ^= 1 << 63
    assert pool.get("a") is None


def break_used(pool):
    pool._used += 64


def break_pinned(pool):
    pool._pinned += 64


def break_extent(pool):
    pool._arena.give(pool._entries["a"].extent)


def break_pins(pool):
    pool._entries["a"].pins += 1
    pool._pinned += 640


@pytest.mark.parametrize("damage", [break_used, break_pinned, break_extent, break_pins])
def test_a_count_that_is_off_is_found(damage):
    pool = new_pool()
    pool.put("a", segment(1))
    pool.check()
    damage(pool)
    with pytest.raises(InvariantError, match="segment"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Any history against a dictionary: name -> seed, tokens and pins."""

    NAMES = "abcdefgh"

    @initialize(grains=st.integers(20, 90))
    def open(self, grains):
        self.arena = Arena(64 * grains, pinned=False)
        self.pool = SegmentPool(self.arena)
        self.size = 64 * grains
        self.kept, self.pins, self.views = {}, {}, {}
        self.failures = 0
        self.seed = 0

    def bytes_of(self, tokens):
        """Keys 24, values 40, kept 4 and codes 7 bytes a token, each in grains."""
        return sum(-(-tokens * size // 64) * 64 for size in (24, 40, 4, 7))

    @property
    def used(self):
        return sum(self.bytes_of(tokens) for _, tokens in self.kept.values())

    @rule(name=st.sampled_from(NAMES), tokens=st.integers(1, 24))
    def put(self, name, tokens):
        self.seed += 1
        if self.pins.get(name):
            with pytest.raises(InvariantError):
                self.pool.put(name, segment(self.seed, tokens))
            return
        needed, free = self.bytes_of(tokens), self.size - self.used
        made = self.pool.put(name, segment(self.seed, tokens))
        assert made or needed > free or self.pins
        assert needed <= free or not made
        if made:
            self.kept[name] = (self.seed, tokens)

    @rule(name=st.sampled_from(NAMES))
    def get(self, name):
        found = self.pool.get(name)
        if name in self.kept:
            same(found, segment(*self.kept[name]))
        else:
            assert found is None

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name):
        if self.pins.get(name):
            with pytest.raises(InvariantError):
                self.pool.drop(name)
            return
        _, tokens = self.kept.pop(name, (0, 0))
        assert self.pool.drop(name) == self.bytes_of(tokens)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def pin(self, data):
        name = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.pin(name)
        self.pins[name] = self.pins.get(name, 0) + 1
        self.views[name] = self.pool.get(name)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        name = data.draw(st.sampled_from(sorted(self.pins)))
        self.pool.unpin(name)
        self.pins[name] -= 1
        if not self.pins[name]:
            del self.pins[name], self.views[name]

    @precondition(lambda self: self.kept.keys() - self.pins.keys())
    @rule(data=st.data(), where=st.integers(0, 10**4))
    def damage(self, data, where):
        unpinned = sorted(self.kept.keys() - self.pins.keys())
        name = data.draw(st.sampled_from(unpinned))
        codes = self.pool.get(name)["codes"].view(-1)
        codes[where % len(codes)] ^= 1
        assert self.pool.get(name) is None
        self.failures += 1
        del self.kept[name]

    @rule()
    def compact(self):
        self.arena.compact()

    @invariant()
    def nothing_is_lost(self):
        assert set(self.pool.names()) == self.kept.keys()
        assert self.pool.used_bytes == self.arena.used_bytes == self.used
        pinned = sum(self.bytes_of(self.kept[name][1]) for name in self.pins)
        assert self.pool.evictable_bytes == self.used - pinned
        assert self.pool.checksum_failures == self.failures
        for name, views in self.views.items():
            same(views, segment(*self.kept[name]))
        self.pool.check()
        self.arena.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    deadline=None, max_examples=25, stateful_step_count=40
)
