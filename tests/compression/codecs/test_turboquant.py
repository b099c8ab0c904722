"""TurboQuant: its law, its rotation and the distortion the paper names."""

import pytest
import torch

from vericache_sglang.compression.codecs.turboquant import (
    TurboQuant,
    coordinate_book,
    random_rotation,
)
from vericache_sglang.errors import CompressionError


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("bits", "wanted"), [(1, 0.363), (2, 0.1175), (3, 0.0345), (4, 0.0095)]
)
def test_distortion_is_that_of_the_best_scalar_quantizer(bits, wanted):
    """Max's table for a normal law (1960), which coordinates of many dims follow."""
    keys, values = drawn((2, 300, 128)) * 7, drawn((2, 300, 128), 1)
    near = TurboQuant(bits).decode(TurboQuant(bits).encode(keys, values)[0])
    for entries, approximate in zip((keys, values), near, strict=True):
        assert relative(entries, approximate) == pytest.approx(wanted, rel=0.03)


def relative(entries, approximate):
    """Mean over vectors of the squared error over the squared norm."""
    error = (approximate - entries).square().sum(2) / entries.square().sum(2)
    return float(error.mean())


def test_vectors_along_one_axis_cost_no_more_than_others():
    """Over many rotations; a scalar quantizer alone would lose the other channels."""
    keys = drawn((1, 4, 128))
    keys[..., 3] *= 100
    codecs = [TurboQuant(2, seed) for seed in range(60)]
    errors = [relative(keys, c.decode(c.encode(keys, keys)[0])[0]) for c in codecs]
    assert sum(errors) / len(errors) == pytest.approx(0.1175, rel=0.05)


def test_the_book_of_one_bit_is_the_mean_of_a_half():
    """In 3 dimensions a coordinate is uniform on [-1, 1]: entries are cell centres."""
    assert coordinate_book(3, 1).tolist() == pytest.approx([-0.5, 0.5], abs=1e-3)
    wanted = [(2 * i + 1) / 8 - 1 for i in range(8)]
    assert coordinate_book(3, 3).tolist() == pytest.approx(wanted, abs=1e-3)


def test_the_rotation_is_orthogonal_and_a_function_of_the_seed():
    rotation = random_rotation(64, 3)
    torch.testing.assert_close(
        rotation @ rotation.t(), torch.eye(64), atol=1e-5, rtol=0
    )
    assert torch.equal(random_rotation(64, 3), rotation)
    assert not torch.equal(random_rotation(64, 4), rotation)


def test_zero_stays_zero_and_scaling_goes_through():
    keys = drawn((1, 5, 16))
    keys[0, 2] = 0
    codec = TurboQuant(3)
    near, _ = codec.decode(codec.encode(keys, keys)[0])
    assert torch.equal(near[0, 2], torch.zeros(16))
    more, _ = codec.decode(codec.encode(keys * 4, keys)[0])
    torch.testing.assert_close(more, near * 4)


def test_bits_are_codes_and_a_norm():
    keys = drawn((2, 9, 128)).to(torch.bfloat16)
    for bits in (1, 3, 4):
        draft, _ = TurboQuant(bits).encode(keys, keys)
        assert draft.bits == bits + 16 / 128


def test_what_it_cannot_do_is_refused():
    with pytest.raises(CompressionError, match="value dim 2 is below 3"):
        TurboQuant().encode(drawn((1, 2, 8)), drawn((1, 2, 2)))
