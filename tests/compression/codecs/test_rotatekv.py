"""RotateKV against the official code's numbers, and its invariants."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.compression.codecs.hadamard import hadamard
from vericache_sglang.compression.codecs.rope import Rope
from vericache_sglang.compression.codecs.rotatekv import (
    RotateKV,
    dequantize,
    massive_slots,
    quantize,
)
from vericache_sglang.compression.codecs.rotatekv_tables import (
    calibrate_order,
    rotate_heads,
    write_tables,
)
from vericache_sglang.errors import CompressionError

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(file, *names):
    with np.load(GOLDEN / file, allow_pickle=False) as arrays:
        return [torch.from_numpy(arrays[name]) for name in names]


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rope(dim):
    return Rope(10_000.0 ** -(torch.arange(0, dim, 2) / dim))


def built(path, heads=4, dim=32, together=4, layers=1, **parameters):
    """Bind a codec whose order is drawn."""
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(heads * dim, generator=generator) for _ in range(layers)]
    tables = write_tables(path / "order.safetensors", orders, together)
    return RotateKV(tables, **parameters).bind(rope(dim))


@pytest.mark.parametrize(("bits", "clip"), [(2, 0.8), (3, 1.0), (4, 1.0)])
def test_the_quantizer_equals_the_official_one(bits, clip):
    rows, wanted = golden("rotatekv_fakequant.npz", "X", f"dq{bits}")
    affine = quantize(rows[..., None, :], bits, clip, bits**2 - 1, torch.float32)
    assert torch.equal(dequantize(affine)[..., 0, :], wanted)


def test_a_layer_equals_the_official_one(tmp_path):
    """Keys behind RoPE and values, decoded, of a run with 16 sinks."""
    before, values, order, sinks = golden(
        "rotatekv_layer0.npz", "k_pre", "v", "perm", "sinks"
    )
    wanted_keys, rotated_values = golden(
        "rotatekv_layer0.npz", "k_postrope_dq", "v_rot_dq"
    )
    tables = write_tables(tmp_path / "order.safetensors", [order], 4)
    codec = RotateKV(tables, bits=2, group=32, clip=0.8).bind(rope(32))
    heads = before[0].float().view(64, 4, 32).transpose(0, 1)
    positions = torch.arange(64)
    keys = rope(32)(heads, positions)
    values = values[0].float().view(64, 4, 32).transpose(0, 1)
    draft, _ = codec.encode(keys, values, positions=positions, sinks=sinks)
    near = codec.decode(draft)
    assert draft.part_shape.exact_tokens == 16
    torch.testing.assert_close(near[0], wanted_keys[0].float(), rtol=0, atol=1e-5)
    # Theirs stay rotated: the output projection undoes it.
    got = hadamard(near[1])
    torch.testing.assert_close(got, rotated_values[0].float(), rtol=0, atol=1e-5)
    assert torch.equal(near[0][:, sinks], keys[:, sinks])


@given(
    st.integers(2, 8),
    st.floats(-100, 100),
    st.sampled_from([0.0, 1e-8, 1e-3, 1.0, 10.0]),
    st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_errors_are_within_a_step_where_the_range_holds_zero(bits, middle, scale, seed):
    groups = drawn((5, 3, 16), seed) * scale + middle
    affine = quantize(groups, bits, 1.0, 2**bits - 1, torch.float32)
    error = (dequantize(affine) - groups).abs()
    assert torch.isfinite(error).all()
    # Half a step for the number, and half for the zero point that is an integer.
    assert (error <= affine.step[..., None] * 1.001 + 1e-4 * abs(middle)).all()


@pytest.mark.parametrize("constant", [0.0, 3.0, -2.5])
def test_constant_groups_are_exact(constant):
    groups = torch.full((2, 3, 8), constant)
    affine = quantize(groups, 2, 1.0, 3, torch.float32)
    assert torch.equal(dequantize(affine), groups)


def test_clipping_reaches_less_far():
    groups = drawn((50, 1, 64))
    for clip in (0.5, 0.8, 1.0):
        near = dequantize(quantize(groups, 4, clip, 15, torch.float32))
        step = (groups.amax(2) - groups.amin(2)) * clip / 15
        reach = (near.amax(2) - groups.amax(2) * clip).abs()
        assert (reach <= step).all()


def test_three_bits_have_eight_published_levels(tmp_path):
    keys = drawn((4, 30, 32))
    positions = torch.arange(30)
    errors = []
    for published in (False, True):
        codec = built(tmp_path, bits=3, group=32, clip=1.0, published_levels=published)
        draft, _ = codec.encode(keys, keys, positions=positions)
        spread = hadamard(keys[:, 0]).amax(1) - hadamard(keys[:, 0]).amin(1)
        steps = draft.tensors["value_step"][0]
        torch.testing.assert_close(steps, spread / (8 if published else 7))
        errors.append((codec.decode(draft)[1] - keys).square().mean())
    assert errors[0] != errors[1]


@pytest.mark.parametrize(
    ("heads", "together", "dim"), [(4, 4, 32), (8, 4, 16), (2, 1, 64)]
)
def test_with_many_bits_everything_comes_back(tmp_path, heads, together, dim):
    """Rotation, order and RoPE are undone: only the quantizer's error is left."""
    codec = built(tmp_path, heads, dim, together, bits=8, group=32, clip=1.0)
    keys, values = drawn((heads, 50, dim)), drawn((heads, 50, dim), 1)
    positions = torch.randint(0, 5000, (heads, 50))
    near = codec.decode(codec.encode(keys, values, positions=positions)[0])
    for entries, approximate in zip((keys, values), near, strict=True):
        relative = (approximate - entries).norm() / entries.norm()
        assert relative < 0.01


def test_a_token_depends_on_itself_only(tmp_path):
    codec = built(tmp_path, group=32)
    keys, values = drawn((4, 20, 32)), drawn((4, 20, 32), 1)
    other = torch.cat([keys[:, :10], 5 * keys[:, 10:]], dim=1)
    positions = torch.arange(20)
    first = codec.decode(codec.encode(keys, values, positions=positions)[0])
    second = codec.decode(codec.encode(other, other, positions=positions)[0])
    assert torch.equal(first[0][:, :10], second[0][:, :10])


def test_rotation_keeps_norms_and_is_its_own_inverse():
    rows = drawn((9, 4 * 16))
    for together in (1, 2, 4):
        turned = rotate_heads(rows, 16, together)
        torch.testing.assert_close(turned.norm(dim=1), rows.norm(dim=1))
        torch.testing.assert_close(rotate_heads(turned, 16, together), rows)


def test_the_order_is_that_of_signed_sums():
    keys = drawn((40, 8)).double()
    sums = (keys @ hadamard(torch.eye(8).double())).sum(0)
    order = calibrate_order(keys, 4, 2)
    assert order.tolist() == sorted(range(8), key=lambda channel: sums[channel])
    ties = calibrate_order(torch.zeros(3, 8), 4, 2)
    assert ties.tolist() == list(range(8))


def test_massive_slots_are_the_tokens_of_the_largest_entries():
    hidden = drawn((30, 6))
    hidden[7, 2], hidden[7, 3], hidden[21, 0] = 90, -80, -70
    assert massive_slots(hidden, 3).tolist() == [7, 21]
    assert massive_slots(hidden[:2], 50).tolist() == [0, 1]


def test_bits_are_codes_step_and_zero_point(tmp_path):
    """2 + 32 / 128 for what is quantized, 16 bits for a sink."""
    codec = built(tmp_path)
    keys = drawn((4, 64, 32)).to(torch.bfloat16)
    sinks = torch.tensor([0, 5])
    draft, residual = codec.encode(keys, keys, positions=torch.arange(64), sinks=sinks)
    row = 2 * 4 * 32
    assert 8 * draft.nbytes == 62 * row * 2.25 + 2 * (row * 16 + 32)
    assert draft.bits == codec.draft_bits(draft.part_shape)
    assert residual.bits == 16


def test_what_does_not_fit_is_refused(tmp_path):
    codec = built(tmp_path, group=32)
    entries, positions = drawn((4, 5, 32)), torch.arange(5)
    with pytest.raises(CompressionError, match=r"'order' is for 1 layers of 128"):
        codec.encode(entries, entries, positions=positions, layer=1)
    with pytest.raises(CompressionError, match=r"'order' is for 1 layers of 128"):
        codec.encode(entries[:2], entries[:2], positions=positions)
    with pytest.raises(CompressionError, match="group 48 does not divide the 128"):
        built(tmp_path, group=48).encode(entries, entries, positions=positions)
    with pytest.raises(CompressionError, match="4 heads cannot be rotated 8 at"):
        built(tmp_path, together=8, group=32).encode(
            entries, entries, positions=positions
        )
    with pytest.raises(CompressionError, match="96 is not a power of two"):
        built(tmp_path, 3, 32, 3, group=32).encode(
            entries[:3], entries[:3], positions=positions
        )


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"bits": 1}, "bits must be 2 to 8, got 1"),
        ({"group": 0}, "group must be >= 1, got 0"),
        ({"clip": 0.0}, r"clip must be in \(0, 1\], got 0.0"),
    ],
)
def test_parameters_out_of_bounds_are_refused(tmp_path, parameters, says):
    with pytest.raises(CompressionError, match=says):
        built(tmp_path, **parameters)
