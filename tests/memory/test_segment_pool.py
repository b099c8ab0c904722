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
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.prefix_cache.host_pool import SegmentPool

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32),
    *(torch.uint8, torch.int64, torch.float8_e4m3fn),
]


def new_pool(nbytes=1 << 16):
    return SegmentPool(HostPagePool(nbytes, 60, pinned=False))


def bits(tensor):
    """A tensor's bytes in C order, element by element."""
    flat = tensor.contiguous().view(-1) if tensor.dim() else tensor.reshape(1)
    return bytes(flat.view(torch.uint8).tolist())


def random_bits(shape, dtype, seed):
    """Any bits, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    count = dtype.itemsize
    for size in shape:
        count *= size
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def segment(seed, tokens=8):
    """A draft part as a server keeps it: entries, positions, scores."""
    return {
        "keys": random_bits((2, tokens, 2, 3), torch.bfloat16, seed),
        "values": random_bits((2, tokens, 2, 5), torch.bfloat16, seed + 1),
        "kept": torch.arange(seed, seed + 2 * tokens, dtype=torch.int32).view(2, -1),
        "scores": random_bits((2, tokens, 1), torch.float32, seed + 2),
    }


def bytes_of(tokens=8):
    """Of ``segment`` in pages of 60 bytes: values begin with a whole one, 20 bytes."""
    values_end = -(-24 * tokens // 20) * 20 + 40 * tokens
    kept_end = -(-values_end // 64) * 64 + 8 * tokens
    return -(-(-(-kept_end // 64) * 64 + 8 * tokens) // 60) * 60


SIZE = bytes_of()


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for field, tensor in wanted.items():
        other = found[field].read()
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert bits(other) == bits(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 0, 4), (7,), (1, 40, 3)], ids=str)
def test_any_dtype_and_shape_comes_back_bit_for_bit(dtype, shape):
    pool, tensors = new_pool(), {"x": random_bits(shape, dtype, 3)}
    assert pool.put("a", tensors)
    same(pool.get("a"), tensors)


def test_a_nan_keeps_its_payload():
    raw = torch.tensor([0x7F81, 0x7FC1, 0xFF8F - 2**16, 0x7FFF], dtype=torch.int16)
    tensors = {"x": raw.view(torch.bfloat16)[None]}
    tensors["turned"] = raw.repeat(3, 1).view(torch.bfloat16).t()
    pool = new_pool()
    pool.put("a", tensors)
    found = pool.get("a")
    assert found["x"].read().view(torch.int16).tolist() == [raw.tolist()]
    assert found["turned"].read().view(torch.int16)[:, 2].tolist() == raw.tolist()


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


def test_bytes_are_counted_in_pages():
    pool, tensors = new_pool(), segment(1)
    pool.put("a", tensors)
    pool.put("scores", {"noted": torch.zeros(2, 8)})  # 64 bytes
    assert (pool.nbytes("a"), pool.nbytes("scores")) == (SIZE, 120)
    assert (pool.used_bytes, pool.evictable_bytes) == (SIZE + 120, SIZE + 120)
    pool.pin("a")
    assert (pool.used_bytes, pool.evictable_bytes) == (SIZE + 120, 120)
    pool.unpin("a")
    assert pool.names() == ["a", "scores"]
    assert (pool.drop("a"), pool.drop("a"), pool.used_bytes) == (SIZE, 0, 120)


def test_without_room_nothing_changes():
    pool = new_pool(2 * SIZE)
    pool.put("a", segment(1))
    pool.put("b", segment(2))
    assert not pool.put("c", segment(3))
    assert not pool.put("a", segment(4)), "old and new one do not fit together"
    same(pool.get("a"), segment(1))
    assert pool.names() == ["a", "b"]
    pool.drop("b")
    assert pool.put("a", segment(4))
    same(pool.get("a"), segment(4))
    assert pool.used_bytes == SIZE
    pool.check()


def test_a_tensor_that_cannot_be_read_takes_nothing():
    pool = new_pool()
    pool.put("a", segment(1))
    with pytest.raises(NotImplementedError):
        pool.put("a", {"x": torch.empty(1, 4, device="meta")})
    same(pool.get("a"), segment(1))
    assert pool._page_pool.used_bytes == pool.used_bytes == SIZE
    pool.check()


def test_a_pinned_name_stays():
    pool = new_pool(4 * SIZE)
    for i, name in enumerate("abcd"):
        pool.put(name, segment(i))
    pool.pin("c")
    pool.pin("c")
    for act in (pool.drop, lambda name: pool.put(name, segment(9))):
        with pytest.raises(InvariantError, match=r"segment c is .* pinned"):
            act("c")
    for name in "ad":
        pool.drop(name)
    assert pool.put("e", segment(5)), "in pages that are no neighbours"
    assert pool.put("f", segment(6))
    for i, name in enumerate("bcef"):
        same(pool.get(name), segment((1, 2, 5, 6)[i]))
    pool.unpin("c")
    with pytest.raises(InvariantError, match="segment c is dropped"):
        pool.drop("c")
    pool.unpin("c")
    assert pool.drop("c") == SIZE
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
    tensors = pool.get("b").values()
    held = [raw for tensor in tensors for at in (0, 1) for raw in tensor.raw(at)]
    where %= sum(len(raw) for raw in held)
    for raw in held:
        if where < len(raw):
            raw[where] ^= 1 << bit
            break
        where -= len(raw)
    assert pool.get("b") is None
    assert pool.checksum_failures == 1
    assert pool.names() == ["a", "c"]
    assert pool.used_bytes == 2 * SIZE
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
    pool.get("a")["kept"].raw(0)[0][0] ^= 1
    with caplog.at_level(logging.WARNING):
        assert [pool.get("a") for _ in range(3)] == [None, None, None]
    assert [r.message for r in caplog.records] == [
        "VeriCache: segment a was damaged in host memory"
    ]
    assert pool.checksum_failures == 1
    assert "a" not in pool
    pool.unpin("a")
    assert pool.used_bytes == SIZE, "a copy may still read it"
    pool.unpin("a")
    assert (pool.used_bytes, pool.names()) == (0, [])
    assert pool.put("a", segment(2))
    same(pool.get("a"), segment(2))


def test_the_checksum_of_a_layer_is_xxh3_of_its_bytes():
    pool = new_pool()
    numbers = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
    pool.put("a", {"b": numbers, "a": torch.ones(2, 1)})
    image = pool._entries["a"].image
    expected = xxhash.xxh3_64(b"\x03\x00\x04\x00\x00\x00\x80\x3f")
    assert image.checksums[1] == expected.intdigest()
    image._checksums[1] ^= 1 << 63
    assert pool.get("a") is None


def break_used(pool):
    pool._used += 64


def break_pinned(pool):
    pool._pinned += 64


def break_pages(pool):
    pool._entries["a"].image.free()


def break_pins(pool):
    pool._entries["a"].pins += 1
    pool._pinned += SIZE + 60


@pytest.mark.parametrize("damage", [break_used, break_pinned, break_pages, break_pins])
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

    @initialize(pages=st.integers(20, 90))
    def open(self, pages):
        self.page_pool = HostPagePool(60 * pages, 60, pinned=False)
        self.pool = SegmentPool(self.page_pool)
        self.size = 60 * pages
        self.kept, self.pins, self.views = {}, {}, {}
        self.failures = 0
        self.seed = 0

    @property
    def used(self):
        return sum(bytes_of(tokens) for _, tokens in self.kept.values())

    @rule(name=st.sampled_from(NAMES), tokens=st.integers(1, 24))
    def put(self, name, tokens):
        self.seed += 1
        if self.pins.get(name):
            with pytest.raises(InvariantError):
                self.pool.put(name, segment(self.seed, tokens))
            return
        needed, free = bytes_of(tokens), self.size - self.used
        made = self.pool.put(name, segment(self.seed, tokens))
        assert made == (needed <= free)
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
        assert self.pool.drop(name) == (bytes_of(tokens) if tokens else 0)

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
        raw = self.pool.get(name)["scores"].raw(where % 2)[-1]
        raw[where % len(raw)] ^= 1
        assert self.pool.get(name) is None
        self.failures += 1
        del self.kept[name]

    @invariant()
    def nothing_is_lost(self):
        assert set(self.pool.names()) == self.kept.keys()
        assert self.pool.used_bytes == self.page_pool.used_bytes == self.used
        pinned = sum(bytes_of(self.kept[name][1]) for name in self.pins)
        assert self.pool.evictable_bytes == self.used - pinned
        assert self.pool.checksum_failures == self.failures
        for name, views in self.views.items():
            same(views, segment(*self.kept[name]))
        self.pool.check()
        self.page_pool.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    deadline=None, max_examples=25, stateful_step_count=40
)
