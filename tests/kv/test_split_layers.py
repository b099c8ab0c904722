"""Splitting a layer and joining it again restores every bit, whatever the indices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.compression.budget import residual_indices
from vericache_sglang.kv.split_layers import join_layer, pick


def layer(tokens, dtype, seed):
    """[tokens, 2, 4] of random bits: NaN, infinities and denormals included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.finfo(dtype).bits // 8
    bits = torch.randint(0, 256, (tokens, 2, 4 * size), generator=generator)
    return bits.to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(tokens=st.integers(2, 30), data=st.data())
def test_round_trip_is_bit_exact(dtype, tokens, data):
    kept_count = data.draw(st.integers(1, tokens - 1))
    order = st.permutations(range(tokens))
    kept = torch.tensor([sorted(data.draw(order)[:kept_count]) for _ in range(2)])
    keys, values = layer(tokens, dtype, 1), layer(tokens, dtype, 2)
    dropped = residual_indices(kept, tokens)
    raw = torch.int32 if dtype == torch.float32 else torch.int16
    for whole in (keys, values):
        part, rest = pick(whole, kept), pick(whole, dropped)
        assert torch.equal(join_layer(part, kept, rest).view(raw), whole.view(raw))


def test_pick_takes_other_tokens_in_every_head():
    entries = torch.arange(12).view(3, 2, 2)
    picked = pick(entries, torch.tensor([[0, 2], [1, 2]]))
    assert picked.tolist() == [[[0, 1], [6, 7]], [[8, 9], [10, 11]]]
