"""Residual KV that is picked from shared full KV, in pages that lie anywhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_segmented import BITS, DTYPES, LAYERS, equal, geometry, random_bits

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.host_image import CopyTarget, RawImage, shapes_of
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.picked_residual import PickedResidual
from vericache_sglang.kv.residual import RawResidual

HEADS = 2
ENTRY = 2 * 12
"""Elements of a token's key and value, so that a page is a whole number of each."""


def scattered(dtype, taken):
    """Return a pool of pages of one or two tokens, every other of the first taken."""
    pool = HostPagePool(1 << 16, ENTRY * dtype.itemsize, pinned=False)
    pages = [pool.take(1) for _ in range(2 * taken)]
    for each in pages[::2]:
        each.free()
    return pool


def filled(pool, counts, dtype, seed):
    """Return an image per count, and keys and values [L, T, H, D] of all of them."""
    images = [RawImage(shapes_of(geometry(dtype), n, dtype), pool) for n in counts]
    shape = (LAYERS, sum(counts), HEADS)
    keys = random_bits((*shape, 4), dtype, seed)
    values = random_bits((*shape, 6), dtype, seed + 1)
    at = 0
    for image, count in zip(images, counts, strict=True):
        for layer in range(LAYERS):
            part = slice(at, at + count)
            image.write(layer, keys[layer, part], values[layer, part])
        at += count
    return images, keys, values


def chosen(tokens, count, seed):
    """Return [L, H, n] int32, ascending: other tokens in every head."""
    random = torch.Generator().manual_seed(seed)
    rows = [
        torch.randperm(tokens, generator=random)[:count].sort().values
        for _ in range(LAYERS * HEADS)
    ]
    return torch.stack(rows).view(LAYERS, HEADS, count).to(torch.int32)


def others(entries, kept):
    """Gather in a loop what a layer [T, H, D] has beside ``kept`` [H, n]."""
    heads = []
    for head, row in enumerate(kept.tolist()):
        left = [t for t in range(len(entries)) if t not in row]
        heads.append(entries.view(BITS[entries.element_size()])[left, head])
    return torch.stack(heads, dim=1)


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kept=st.integers(0, 3),
    taken=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_it_is_what_the_draft_kv_lacks(counts, kept, taken, dtype, seed):
    total = sum(counts)
    pool = scattered(dtype, taken)
    images, *sides = filled(pool, counts, dtype, seed)
    where = chosen(total, min(kept, total - 1), seed)
    residual = PickedResidual(images, where, pool, dtype)
    assert residual.sealed
    assert residual.slots == total - where.shape[2]
    assert residual.nbytes == sum(image.nbytes for image in images)
    assert residual.nbytes_layer * total == residual.slots * sum(
        image.nbytes_layer for image in images
    )
    for layer in range(LAYERS):
        residual.verify(layer)
        wanted = [others(side[layer], where[layer]) for side in sides]
        for (block,), own in zip(residual.blocks(layer, None), wanted, strict=True):
            assert torch.equal(block.view(own.dtype), own)
        buffers = tuple(
            torch.zeros(total + 3, *side.shape[2:]).to(dtype) for side in sides
        )
        slots = torch.arange(residual.slots).flip(0) + 1
        residual.place(layer, buffers, CopyTarget(slots), None)
        for buffer, own in zip(buffers, wanted, strict=True):
            equal(buffer[slots], own.view(dtype))


def test_it_is_restored_among_the_tokens_that_are_there():
    dtype = torch.float32
    pool = scattered(dtype, 10)
    images, keys, values = filled(pool, [4, 3], dtype, 5)
    where = chosen(7, 3, 1)
    residual = PickedResidual(images, where, pool, dtype)
    slots, exact = torch.tensor([9, 2, 4, 6, 1, 0, 8]), torch.tensor([2, 4, 3])
    for layer in range(LAYERS):
        buffers = torch.zeros(10, HEADS, 4), torch.zeros(10, HEADS, 6)
        for buffer, side in zip(buffers, (keys, values), strict=True):
            for head, row in enumerate(where[layer].tolist()):
                buffer[exact, head] = side[layer][row, head]
        target = CopyTarget(slots, where, exact)
        with target.joined(layer, buffers):
            residual.place(layer, buffers, target, None)
        for buffer, side in zip(buffers, (keys, values), strict=True):
            equal(buffer[slots], side[layer])


def test_a_damaged_image_fails_all_that_read_it():
    pool = scattered(torch.float32, 3)
    images, *_ = filled(pool, [4, 3], torch.float32, 5)
    readers = [
        PickedResidual(images, chosen(7, 2, seed), pool, torch.float32)
        for seed in (1, 2)
    ]
    images[0].tensors["values"].raw(1)[0][0] ^= 1
    for residual in readers:
        residual.verify(0)
        with pytest.raises(TransferError, match="checksum differs in layer 1"):
            residual.verify(1)
        with pytest.raises(InvariantError, match="no kept tokens"):
            residual.describe(chosen(7, 2, 1), chosen(7, 0, 1))


def test_it_equals_one_of_the_same_tokens_and_images_alone():
    pool, dtype = scattered(torch.float32, 3), torch.float32
    (shared, own), *_ = filled(pool, [4, 3], dtype, 5)
    (_, twin), *_ = filled(pool, [4, 3], dtype, 5)
    (_, stranger), *_ = filled(pool, [4, 3], dtype, 6)
    where = chosen(7, 2, 1)
    first = PickedResidual([shared, own], where, pool, dtype)
    assert first.equals(PickedResidual([shared, twin], where.clone(), pool, dtype))
    for images, tokens in (
        ([shared, stranger], where),
        ([shared, own], chosen(7, 2, 2)),
        ([shared], where),
    ):
        assert not first.equals(PickedResidual(images, tokens, pool, dtype))
    assert not first.equals(RawResidual(geometry(dtype), 5, 2, dtype))
