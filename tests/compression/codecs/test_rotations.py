"""Rotary embedding and Walsh-Hadamard transform against their definitions."""

import cmath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.compression.codecs.hadamard import hadamard
from vericache_sglang.compression.codecs.rope import Rope
from vericache_sglang.errors import CompressionError


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rope(dim, base=10_000.0, amplitude=1.0):
    places = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return Rope(base**-places, amplitude)


@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("amplitude", [1.0, 1.3])
def test_rope_multiplies_pairs_as_complex_numbers(rotated, amplitude):
    keys, turn = drawn((2, 5, 8)), rope(rotated, amplitude=amplitude)
    positions = torch.tensor([0, 1, 7, 100, 3])
    turned = turn(keys, positions)
    for h in range(2):
        for t, position in enumerate(positions.tolist()):
            for i, frequency in enumerate(turn.frequencies.tolist()):
                j = i + rotated // 2
                pair = complex(keys[h, t, i], keys[h, t, j])
                wanted = pair * cmath.rect(amplitude, position * frequency)
                got = complex(turned[h, t, i], turned[h, t, j])
                assert abs(got - wanted) < 1e-5
    assert torch.equal(turned[..., rotated:], keys[..., rotated:])


@pytest.mark.parametrize("amplitude", [1.0, 1.3])
def test_the_inverse_restores_keys_of_any_positions(amplitude):
    keys, turn = drawn((3, 40, 16)), rope(16, amplitude=amplitude)
    positions = torch.randint(0, 30_000, (3, 40))
    back = turn(turn(keys, positions), positions, inverse=True)
    torch.testing.assert_close(back, keys, rtol=1e-5, atol=1e-5)
    alone = torch.cat([turn(keys[h, None], positions[h]) for h in range(3)])
    torch.testing.assert_close(turn(keys, positions), alone)


def test_more_frequencies_than_pairs_are_refused():
    with pytest.raises(CompressionError, match="5 frequencies rotate 10 elements"):
        rope(10)(drawn((1, 2, 8)), torch.arange(2))


def sylvester(size):
    """Build the matrix from its definition: parity of the common bits."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / size**0.5


@pytest.mark.parametrize("size", [1, 2, 32, 128, 512])
def test_hadamard_is_the_matrix_product(size):
    rows = drawn((3, 2, size)).double()
    torch.testing.assert_close(hadamard(rows), rows @ sylvester(size))


@given(st.integers(0, 9), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_hadamard_is_its_own_inverse_and_keeps_norms(power, seed):
    rows = drawn((4, 2**power), seed)
    turned = hadamard(rows)
    torch.testing.assert_close(hadamard(turned), rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned.norm(dim=1), rows.norm(dim=1))


@pytest.mark.parametrize("size", [0, 3, 12, 96])
def test_other_sizes_have_no_hadamard_transform(size):
    with pytest.raises(CompressionError, match=f"{size} is not a power of two"):
        hadamard(torch.zeros(2, size))
