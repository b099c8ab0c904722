"""A complement of segments is, to all who read it, one complement of the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.residual import RawResidual
from vericache_sglang.kv.segmented_residual import SegmentedResidual

LAYERS = 2
BITS = {2: torch.int16, 4: torch.int32}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def geometry(dtype):
    return KVGeometry(
        layers=LAYERS,
        kv_heads=2,
        head_dim=4,
        v_head_dim=6,
        element_bytes=dtype.itemsize,
        page_size=1,
    )


def random_bits(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (*shape[:-1], shape[-1] * dtype.itemsize)
    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def of_segments(counts, dtype, kept=3):
    """Return one complement per count of slots, described, and all of them as one."""
    made = [RawResidual(geometry(dtype), each, kept, dtype) for each in counts]
    for at, each in enumerate(made):
        where = torch.arange(at, at + kept, dtype=torch.int32).expand(LAYERS, 2, -1)
        each.describe(where, where[..., :0])
    return made, SegmentedResidual(made)


def no_drafts(layer):
    return []


def equal(found, wanted):
    assert found.shape == wanted.shape
    bits = BITS[wanted.element_size()]
    assert torch.equal(found.contiguous().view(bits), wanted.contiguous().view(bits))


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_it_equals_one_residual_of_the_whole(counts, dtype, seed):
    made, parts = of_segments(counts, dtype)
    total = sum(counts)
    whole = RawResidual(geometry(dtype), total, 3, dtype)
    assert not parts.sealed
    for layer in range(LAYERS):
        keys = random_bits((total, 2, 4), dtype, seed + layer)
        values = random_bits((total, 2, 6), dtype, seed + layer + 50)
        parts.write(layer, keys, values)
        whole.write(layer, keys, values)
        parts.verify(layer)
        for blocks, wanted in zip(
            parts.blocks(layer, None), (keys, values), strict=True
        ):
            assert [len(block) for block in blocks] == counts
            equal(torch.cat(blocks), wanted)
        for blocks, wanted in zip(
            whole.blocks(layer, no_drafts), (keys, values), strict=True
        ):
            equal(torch.cat(blocks), wanted)
        at = 0
        for each in made:  # every segment has its own, whoever reads it alone
            equal(each.keys[layer], keys[at : at + each.slots])
            at += each.slots
    assert (parts.slots, parts.layers) == (whole.slots, whole.layers)
    assert parts.nbytes_layer == whole.nbytes_layer
    assert parts.nbytes == sum(each.nbytes for each in made)
    assert parts.sealed
    assert len(parts.checksums) == LAYERS * len(counts)


@pytest.mark.parametrize("part", ["keys", "values", "kept"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_flipped_bit_of_any_segment_is_noticed_in_its_layer(part, which):
    made, parts = of_segments([2, 3, 4], torch.bfloat16)
    for layer in range(LAYERS):
        keys = random_bits((9, 2, 4), torch.bfloat16, layer)
        values = random_bits((9, 2, 6), torch.bfloat16, layer + 9)
        parts.write(layer, keys, values)
    raw = getattr(made[which], part).view(torch.uint8).view(LAYERS, -1)
    raw[1, -1] ^= 64
    parts.verify(0)
    with pytest.raises(TransferError, match="residual KV checksum differs in layer 1"):
        parts.verify(1)
    parts.seal(1)
    parts.verify(1)


def test_a_layer_of_which_a_segment_is_not_sealed_is_not_trusted():
    made, parts = of_segments([2, 3], torch.float32)
    made[0].write(0, torch.zeros(2, 2, 4), torch.zeros(2, 2, 6))
    assert not parts.sealed
    with pytest.raises(TransferError, match="layer 0"):
        parts.verify(0)


@pytest.mark.parametrize("entries", [4, 6])
def test_too_many_or_too_few_entries_are_refused_and_none_is_written(entries):
    _, parts = of_segments([2, 3], torch.float32)
    with pytest.raises(InvariantError, match=f"{entries} entries for 5 slots"):
        parts.write(0, torch.ones(entries, 2, 4), torch.ones(entries, 2, 6))
    assert parts.checksums == (None,) * 4


def test_it_is_nobody_s_twin_and_has_no_positions_of_its_own():
    made, parts = of_segments([2], torch.float32)
    assert not parts.equals(parts)
    assert not parts.equals(made[0])
    with pytest.raises(InvariantError, match="has no positions of its own"):
        _ = parts.kept
    with pytest.raises(InvariantError, match="described by its segments"):
        parts.describe(torch.zeros(2, 2, 3), torch.zeros(2, 2, 0))


def test_it_owns_no_memory():
    made, parts = of_segments([2, 3], torch.float32)
    assert parts.held_bytes == 0
    parts.free()
    for each in made:
        assert not each.pages.freed
