"""KIVI against the official code's numbers, and its invariants."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.compression.codecs.packing import unpack
from vericache_sglang.errors import CompressionError

GOLDEN = Path(__file__).parents[1] / "golden" / "kivi.npz"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def golden(*names):
    """Load arrays of the official code, batch dimension dropped."""
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return [torch.from_numpy(arrays[name])[0] for name in names]


def drawn(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def from_words(words, bits, dim):
    """Read codes the official way: 32 // bits of them in an int32 along ``dim``."""
    shifts = torch.arange(0, 32, bits)
    codes = words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (2 - dim))
    return (codes & (1 << bits) - 1).flatten(dim, dim + 1).to(torch.uint8)


@pytest.mark.parametrize("bits", [2, 4])
def test_keys_equal_the_official_codes(bits):
    keys, values = golden("K", "V")
    draft, _ = KIVI(bits=bits).encode(keys, values)
    tensors = draft.tensors
    words, step, minimum, dequantized = golden(
        *(f"k{bits}_{name}" for name in ("code", "scale", "mn", "dq"))
    )
    codes = unpack(tensors["key_codes"], bits, 64)
    assert torch.equal(codes, from_words(words, bits, 1))
    assert torch.equal(tensors["key_step"], step[:, :, 0])
    assert torch.equal(tensors["key_minimum"], minimum[:, :, 0])
    assert torch.equal(KIVI(bits=bits).decode(draft)[0], dequantized)


@pytest.mark.parametrize("bits", [2, 4])
def test_values_equal_the_official_codes(bits):
    _, values = golden("K", "V")
    # 32 more tokens push every one of theirs out of the window.
    values = torch.cat([values, drawn((2, 32, 64))], dim=1)
    draft, _ = KIVI(bits=bits).encode(values, values)
    words, step, minimum, dequantized = golden(
        *(f"v{bits}_{name}" for name in ("code", "scale", "mn", "dq"))
    )
    codes = unpack(draft.tensors["value_codes"], bits, 64)
    assert torch.equal(codes, from_words(words, bits, 2))
    assert torch.equal(draft.tensors["value_step"], step[..., 0])
    assert torch.equal(draft.tensors["value_minimum"], minimum[..., 0])
    decoded = KIVI(bits=bits).decode(draft)[1]
    assert torch.equal(decoded[:, :96], dequantized)
    assert torch.equal(decoded[:, 96:], values[:, 96:])


@pytest.mark.parametrize(
    ("tokens", "keys", "values"),
    [(100, 96, 68), (96, 96, 64), (20, 0, 0), (127, 96, 95), (128, 128, 96)],
)
def test_the_window_is_that_of_the_official_code(tokens, keys, values):
    """Section 3.1's observed lengths: T mod R keys and R values stay exact."""
    entries = drawn((1, tokens, 32))
    tensors = KIVI().encode(entries, entries)[0].tensors
    assert tensors["key_codes"].shape[1] == keys
    assert tensors["key_tail"].shape[1] == tokens - keys
    assert tensors["value_codes"].shape[1] == values
    assert tensors["value_tail"].shape[1] == tokens - values


@pytest.mark.parametrize("window", [32, 64])
@pytest.mark.parametrize("start", [20, 32, 96, 100])
@pytest.mark.parametrize("step", [1, 7])
def test_appending_equals_encoding_at_once(window, start, step):
    keys, values = drawn((2, 180, 32), torch.bfloat16), drawn((2, 180, 64), seed=1)
    values = values.to(torch.bfloat16)
    codec = KIVI(window=window)
    draft, _ = codec.encode(keys[:, :start], values[:, :start])
    for at in range(start, 180, step):
        new = slice(at, at + step)
        draft = codec.extend(draft, keys[:, new], values[:, new])
    whole, _ = codec.encode(keys, values)
    assert draft.part_shape == whole.part_shape
    for field, tensor in whole.tensors.items():
        assert torch.equal(draft.tensors[field], tensor), field


@given(
    st.integers(2, 8),
    st.sampled_from(DTYPES),
    st.integers(1, 80),
    st.floats(1e-2, 1e2),
    st.integers(0, 2**31),
)
def test_errors_are_within_half_a_step(bits, dtype, tokens, scale, seed):
    keys = drawn((2, tokens, 16), dtype, seed) * scale
    values = drawn((2, tokens, 32), dtype, seed + 1) * scale
    codec = KIVI(bits, 16, 16)
    draft, _ = codec.encode(keys, values)
    near = codec.decode(draft)
    tensors = draft.tensors
    # Rounding the step moves the largest code, rounding the result moves it again.
    slack = torch.finfo(dtype).eps * (2**bits + 1)
    for entries, approximate, steps in (
        (keys, near[0], tensors["key_step"].repeat_interleave(16, 1)),
        (values, near[1], tensors["value_step"].repeat_interleave(16, 2)),
    ):
        count = steps.shape[1]
        error = (approximate - entries).double().abs()
        rounding = torch.finfo(dtype).eps * entries.double().abs()
        bound = steps.double() * (0.5 + slack) + rounding[:, :count]
        assert (error[:, :count] <= bound).all()
        assert torch.equal(approximate[:, count:], entries[:, count:])


def test_minimum_and_maximum_of_a_group_come_back():
    keys = drawn((2, 64, 8))
    values = drawn((2, 64, 64))
    for bits in (2, 3, 4, 8):
        codec = KIVI(bits)
        near, _ = codec.decode(codec.encode(keys, values)[0])
        for tokens in (slice(0, 32), slice(32, 64)):
            group, got = keys[:, tokens], near[:, tokens]
            assert torch.equal(got.amin(1), group.amin(1))
            torch.testing.assert_close(got.amax(1), group.amax(1), rtol=1e-6, atol=1e-6)


def test_encoding_twice_changes_nothing_more():
    codec = KIVI(4)
    keys, values = drawn((2, 96, 32)), drawn((2, 96, 64))
    once = codec.decode(codec.encode(keys, values)[0])
    twice = codec.decode(codec.encode(*once)[0])
    for first, second in zip(once, twice, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


def test_positive_affine_maps_go_through():
    codec = KIVI(3)
    keys, values = drawn((2, 96, 32)), drawn((2, 96, 64))
    near = codec.decode(codec.encode(keys, values)[0])
    moved = codec.decode(codec.encode(keys * 4 + 2, values * 4 + 2)[0])
    for plain, other in zip(near, moved, strict=True):
        torch.testing.assert_close(plain * 4 + 2, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_groups_are_exact(dtype):
    entries = torch.full((1, 64, 32), 0.3, dtype=dtype)
    entries[:, 32:] = 0
    near = KIVI().decode(KIVI().encode(entries, entries)[0])
    assert all(torch.equal(approximate, entries) for approximate in near)


@pytest.mark.parametrize(
    ("bits", "group", "wanted"),
    [(2, 32, 3.0), (2, 64, 2.5), (4, 32, 5.0), (3, 32, 4.0)],
)
def test_bits_are_codes_and_two_halves_per_group(bits, group, wanted):
    """Codes and 32 / g for what is quantized; the window costs what it is."""
    entries = drawn((2, 64 * 16, 128), torch.bfloat16)
    draft, residual = KIVI(bits, group, group).encode(entries, entries)
    tail = group * 16 / (2 * 64 * 16)
    assert draft.bits == pytest.approx(wanted * (1 - tail / 16) + tail)
    assert draft.bits == KIVI(bits, group, group).draft_bits(draft.part_shape)
    assert residual.bits == 16


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(CompressionError, match="group 32 does not divide"):
        KIVI().encode(drawn((1, 40, 32)), drawn((1, 40, 48)))
    draft, _ = KIVI().encode(drawn((1, 40, 32)), drawn((1, 40, 32)))
    with pytest.raises(CompressionError, match="does not extend"):
        KIVI().extend(draft, drawn((2, 1, 32)), drawn((2, 1, 32)))
