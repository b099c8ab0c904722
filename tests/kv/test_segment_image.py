"""What an image of a segment holds comes back bit for bit, or is found damaged."""

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import TransferError
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.prefix_cache.segment_images import SegmentImage

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32),
    *(torch.uint8, torch.int64, torch.float8_e4m3fn),
]


def intact(image):
    """Return whether every layer matches its checksum; waits for a running save."""
    try:
        for layer in range(image.layers):
            image.verify(layer)
    except TransferError:
        return False
    return True


def new_pool(nbytes=1 << 16):
    return HostPagePool(nbytes, 60, pinned=False)


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
    tensors = {"x": random_bits(shape, dtype, 3)}
    image = SegmentImage.copied(tensors, new_pool())
    assert intact(image)
    same(image.tensors, tensors)


def test_a_nan_keeps_its_payload():
    raw = torch.tensor([0x7F81, 0x7FC1, 0xFF8F - 2**16, 0x7FFF], dtype=torch.int16)
    tensors = {"x": raw.view(torch.bfloat16)[None]}
    tensors["turned"] = raw.repeat(3, 1).view(torch.bfloat16).t()
    found = SegmentImage.copied(tensors, new_pool()).tensors
    assert found["x"].read().view(torch.int16).tolist() == [raw.tolist()]
    assert found["turned"].read().view(torch.int16)[:, 2].tolist() == raw.tolist()


def test_strides_are_followed():
    whole = torch.arange(60, dtype=torch.float32).view(5, 4, 3)
    tensors = {"t": whole.transpose(0, 2), "s": whole[::2, 1:3], "e": whole[:, :1, :1]}
    tensors["e"] = tensors["e"].expand(5, 4, 3)
    same(SegmentImage.copied(tensors, new_pool()).tensors, tensors)


def test_what_is_kept_is_a_copy():
    tensors = segment(1)
    image = SegmentImage.copied(tensors, new_pool())
    wanted = {field: tensor.clone() for field, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.view(torch.uint8).zero_()
    assert intact(image)
    same(image.tensors, wanted)


def test_without_room_nothing_is_taken():
    pool = new_pool(2 * SIZE)
    held = [SegmentImage.copied(segment(i), pool) for i in (1, 2)]
    assert [image.held_bytes for image in held] == [SIZE, SIZE]
    assert SegmentImage.copied(segment(3), pool) is None
    same(held[0].tensors, segment(1))
    held[1].free()
    same(SegmentImage.copied(segment(4), pool).tensors, segment(4))
    assert pool.used_bytes == 2 * SIZE
    pool.check()


def test_pages_that_are_no_neighbours_hold_an_image():
    pool = new_pool(4 * SIZE)
    held = [SegmentImage.copied(segment(i), pool) for i in range(4)]
    held[0].free()
    held[3].free()
    both = [SegmentImage.copied(segment(i, 9 - i // 5), pool) for i in (5, 6)]
    for image, seed in zip([held[1], held[2], both[1]], (1, 2, 6), strict=True):
        same(image.tensors, segment(seed))


def test_a_tensor_that_cannot_be_read_takes_nothing():
    pool = new_pool()
    image = SegmentImage.copied(segment(1), pool)
    with pytest.raises(NotImplementedError):
        SegmentImage.copied({"x": torch.empty(1, 4, device="meta")}, pool)
    same(image.tensors, segment(1))
    assert pool.used_bytes == SIZE
    pool.check()


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_one_flipped_bit_is_noticed(where, bit):
    pool = new_pool()
    a, b, c = (SegmentImage.copied(segment(i), pool) for i in range(3))
    tensors = b.tensors.values()
    held = [raw for tensor in tensors for at in (0, 1) for raw in tensor.raw(at)]
    where %= sum(len(raw) for raw in held)
    for raw in held:
        if where < len(raw):
            raw[where] ^= 1 << bit
            break
        where -= len(raw)
    assert [intact(image) for image in (a, b, c)] == [True, False, True]
    same(a.tensors, segment(0))
    same(c.tensors, segment(2))


def test_the_checksum_of_a_layer_is_xxh3_of_its_bytes():
    numbers = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
    image = SegmentImage.copied({"b": numbers, "a": torch.ones(2, 1)}, new_pool())
    expected = xxhash.xxh3_64(b"\x03\x00\x04\x00\x00\x00\x80\x3f")
    assert image.checksums[1] == expected.intdigest()
    image._checksums[1] ^= 1 << 63
    assert not intact(image)
