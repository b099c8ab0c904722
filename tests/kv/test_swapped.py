"""A parked request comes back bit for bit, into whatever slots it gets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_image import CopyTarget
from vericache_sglang.kv.swapped import SwappedImage, gathered
from vericache_sglang.kv.thread_transfers import ThreadTransfers

LAYERS, PAGES = 2, 6
DTYPES = [torch.float32, torch.bfloat16]


def geometry(dtype, page=1):
    return KVGeometry(
        layers=LAYERS,
        kv_heads=2,
        head_dim=4,
        v_head_dim=6,
        element_bytes=dtype.itemsize,
        page_size=page,
    )


def random_bits(slots, width, dtype, seed):
    """[slots, 2, width] of random bits: NaN payloads and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (slots, 2, width * dtype.itemsize), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def pool(slots, dtype, seed):
    keys = [random_bits(slots, 4, dtype, seed + layer) for layer in range(LAYERS)]
    values = [random_bits(slots, 6, dtype, seed + 9 + layer) for layer in range(LAYERS)]
    return keys, values


def rows(buffer):
    """Every slot's bytes, as Python integers."""
    return buffer.view(torch.uint8).flatten(1).tolist()


def fill(image, k_buffers, v_buffers, slots):
    """Copy the entries in these slots into an image."""
    for layer, pair in enumerate(gathered(k_buffers, v_buffers, slots)):
        image.write(layer, *pair)


def restore(image, k_buffers, v_buffers, slots):
    """Copy an image into these slots."""
    link = ThreadTransfers(k_buffers, v_buffers, 0.0)
    try:
        link.place(image, CopyTarget(slots))
    finally:
        link.close()


def slots_of(pages, count, page):
    listed = [p * page + offset for p in pages for offset in range(page)]
    return torch.tensor(listed[:count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 16])
@given(data=st.data())
def test_parking_and_restoring_elsewhere_keeps_every_bit(dtype, page, data):
    order = st.permutations(range(PAGES))
    count = data.draw(st.integers(1, PAGES * page))
    seed = data.draw(st.integers(0, 1000))
    before = slots_of(data.draw(order), count, page)
    after = slots_of(data.draw(order), count, page)
    k_buffers, v_buffers = pool(PAGES * page, dtype, seed)
    image = SwappedImage(geometry(dtype, page), count, dtype)
    fill(image, k_buffers, v_buffers, before)
    assert image.sealed
    k_new, v_new = pool(PAGES * page, dtype, seed + 50)
    expected = [rows(buffer) for buffer in [*k_new, *v_new]]
    for wanted, old in zip(expected, [*k_buffers, *v_buffers], strict=True):
        held = rows(old)
        for source, target in zip(before.tolist(), after.tolist(), strict=True):
            wanted[target] = held[source]
    restore(image, k_new, v_new, after)
    assert [rows(buffer) for buffer in [*k_new, *v_new]] == expected


def test_a_bfloat16_nan_keeps_its_payload():
    quiet = torch.tensor([0x7F81, 0x7FC1, 0xFF8F - 2**16, 0x7FFF], dtype=torch.int16)
    entry = quiet.view(torch.bfloat16).expand(8, 2, 4).contiguous()
    image = SwappedImage(
        KVGeometry(
            layers=1,
            kv_heads=2,
            head_dim=4,
            v_head_dim=4,
            element_bytes=2,
            page_size=1,
        ),
        1,
        torch.bfloat16,
    )
    fill(image, [entry], [entry], torch.tensor([3]))
    target = torch.zeros(8, 2, 4, dtype=torch.bfloat16)
    restore(image, [target], [target.clone()], torch.tensor([5]))
    assert target[5, 0].view(torch.int16).tolist() == quiet.tolist()


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_flipped_bit_names_its_layer_and_is_not_restored(part, layer):
    k_buffers, v_buffers = pool(8, torch.float32, 3)
    image = SwappedImage(geometry(torch.float32), 4, torch.float32)
    slots = torch.tensor([6, 1, 0, 7])
    fill(image, k_buffers, v_buffers, slots)
    getattr(image, part).view(torch.uint8)[layer, 2, 1, 5] ^= 4
    k_new, v_new = pool(8, torch.float32, 60)
    untouched = rows(k_new[layer]) + rows(v_new[layer])
    with pytest.raises(
        TransferError, match=f"swapped image checksum differs in layer {layer}"
    ):
        restore(image, k_new, v_new, slots)
    assert rows(k_new[layer]) + rows(v_new[layer]) == untouched


def test_as_many_slots_as_entries_or_none():
    k_buffers, v_buffers = pool(8, torch.float32, 3)
    image = SwappedImage(geometry(torch.float32), 4, torch.float32)
    with pytest.raises(InvariantError, match="3 entries for 4 slots"):
        fill(image, k_buffers, v_buffers, torch.tensor([0, 1, 2]))


def test_layers_are_gathered_one_at_a_time():
    k_buffers, v_buffers = pool(8, torch.bfloat16, 3)
    slots = torch.tensor([6, 1, 0])
    blocks = gathered(k_buffers, v_buffers, slots)
    for k_buffer, v_buffer in zip(k_buffers, v_buffers, strict=True):
        k_buffer[6] = 2.5  # after the call, before this layer is asked for
        keys, values = next(blocks)
        assert keys.shape == (3, 2, 4)
        assert keys[0].eq(2.5).all()
        assert rows(values) == [rows(v_buffer)[slot] for slot in (6, 1, 0)]
