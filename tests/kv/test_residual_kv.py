"""A complement says what it holds, and notices every changed bit."""

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.residual import RawResidual

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def geometry(dtype):
    return KVGeometry(
        layers=3,
        kv_heads=2,
        head_dim=4,
        v_head_dim=6,
        element_bytes=dtype.itemsize,
        page_size=1,
    )


def filled(dtype, seed=0, slots=5, kept=3):
    """A sealed complement of random bits, NaN and infinities among them."""
    made = RawResidual(geometry(dtype), slots, kept, dtype)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (made.keys, made.values, made.kept):
        raw = torch.randint(0, 256, (tensor.nbytes,), generator=generator)
        tensor.view(torch.uint8).view(-1).copy_(raw)
    for layer in range(3):
        made.seal(layer)
    return made


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_its_bytes_are_counted(dtype, size):
    made = filled(dtype)
    # A slot and layer hold 2 heads of 4 + 6 elements.
    assert (made.slots, made.layers) == (5, 3)
    assert made.nbytes_layer == 5 * 2 * 10 * size
    assert made.nbytes == 3 * made.nbytes_layer + 3 * 2 * 3 * 4


@pytest.mark.parametrize("dtype", BITS)
@given(
    part=st.sampled_from(["keys", "values", "kept"]),
    where=st.integers(0, 10**6),
    bit=st.integers(0, 7),
)
def test_one_flipped_bit_is_noticed_in_its_layer(dtype, part, where, bit):
    made = filled(dtype)
    raw = getattr(made, part).view(torch.uint8).view(3, -1)
    layer, byte = divmod(where % raw.numel(), raw.shape[1])
    raw[layer, byte] ^= 1 << bit
    for other in {0, 1, 2} - {layer}:
        made.verify(other)
    with pytest.raises(
        TransferError, match=f"residual KV checksum differs in layer {layer}"
    ):
        made.verify(layer)
    raw[layer, byte] ^= 1 << bit
    made.verify(layer)


def test_the_checksum_is_xxh3_of_keys_values_and_positions():
    made = filled(torch.float32)
    bits = b"".join(
        bytes(tensor[1].contiguous().view(torch.uint8).flatten().tolist())
        for tensor in (made.keys, made.values, made.kept)
    )
    assert made.checksums[1] == xxhash.xxh3_64_intdigest(bits)


def test_a_layer_is_trusted_only_once_it_is_sealed():
    made = RawResidual(geometry(torch.float32), 2, 1, torch.float32)
    with pytest.raises(TransferError, match="in layer 0"):
        made.verify(0)
    assert not made.sealed
    for layer in range(3):
        made.write(layer, torch.ones(2, 2, 4), torch.ones(2, 2, 6))
        made.verify(layer)
    assert made.sealed


@pytest.mark.parametrize("dtype", BITS)
def test_writing_keeps_every_bit(dtype):
    source, target = filled(dtype, seed=1), filled(dtype, seed=2)
    for layer in range(3):
        target.write(layer, source.keys[layer], source.values[layer])
    assert torch.equal(target.keys.view(BITS[dtype]), source.keys.view(BITS[dtype]))
    assert torch.equal(target.values.view(BITS[dtype]), source.values.view(BITS[dtype]))


def test_one_whose_pages_lie_apart_holds_the_same():
    page_pool = HostPagePool(96 * 64, 96, pinned=False)
    for each in [page_pool.take(1) for _ in range(64)][::2]:
        each.free()
    free = page_pool.free_bytes
    made = RawResidual(geometry(torch.float32), 5, 3, torch.float32, page_pool)
    kept = torch.arange(18, dtype=torch.int32).view(3, 2, 3)
    made.describe(kept, kept[..., :0])
    keys, values = torch.randn(3, 5, 2, 4), torch.randn(3, 5, 2, 6)
    for layer in range(3):
        made.write(layer, keys[layer], values[layer])
        made.verify(layer)
    assert torch.equal(made.keys, keys)
    assert torch.equal(made.values, values)
    assert torch.equal(made.kept, kept)
    other = RawResidual(geometry(torch.float32), 5, 3, torch.float32)
    other.describe(kept, kept[..., :0])
    for layer in range(3):
        other.write(layer, keys[layer], values[layer])
    assert made.checksums == other.checksums
    assert made.equals(other)
    made.tensors["values"].raw(1)[-1][-1] ^= 1
    with pytest.raises(TransferError, match="checksum differs in layer 1"):
        made.verify(1)
    assert not made.equals(other)
    made.free()
    assert page_pool.free_bytes == free
    page_pool.check()
    with pytest.raises(InvariantError, match="freed"):
        made.verify(0)
    with pytest.raises(InvariantError, match="freed twice"):
        made.free()


def test_an_image_the_pool_has_no_room_for_allocates_nothing():
    page_pool = HostPagePool(1024, 64, pinned=False)
    with pytest.raises(TransferError, match="1288 bytes exceed the 1024 left of"):
        # 480 and 720 bytes of entries, and 72 of positions at a multiple of 64.
        RawResidual(geometry(torch.float32), 5, 3, torch.float32, page_pool)
    assert page_pool.used_bytes == 0


@pytest.mark.parametrize("dtype", BITS)
def test_equality_is_of_bits(dtype):
    one, same = filled(dtype), filled(dtype)
    assert one.keys.isnan().any(), "NaN is not equal to itself, its bits are"
    assert one.equals(same)
    assert not one.equals(filled(dtype, seed=1))
    assert not one.equals(filled(dtype, slots=6))
    assert not one.equals(filled(dtype, kept=2))


@pytest.mark.parametrize("part", ["keys", "values", "kept"])
def test_equal_checksums_do_not_pass_for_equal_bits(part):
    one, damaged = filled(torch.float32), filled(torch.float32)
    getattr(damaged, part).view(torch.uint8).view(-1)[5] ^= 1
    assert one.checksums == damaged.checksums
    assert not one.equals(damaged)
