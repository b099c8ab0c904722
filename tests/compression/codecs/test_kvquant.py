"""KVQuant against the official code's numbers, and its invariants."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vericache_sglang.compression.codecs.kvquant import KVQuant
from vericache_sglang.compression.codecs.kvquant_tables import (
    KVQuantTables,
    Samples,
    calibrate_layer,
    write_tables,
)
from vericache_sglang.compression.codecs.nuq import (
    NuqRows,
    Scale,
    decode_rows,
    encode_rows,
    inner_range,
)
from vericache_sglang.compression.codecs.rope import Rope
from vericache_sglang.errors import CompressionError

GOLDEN = Path(__file__).parents[1] / "golden" / "kvquant.npz"
SINKS = 4  # the official run kept its first four tokens
HEADS, DIM = 2, 16


def golden(*names):
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return [torch.from_numpy(arrays[name]) for name in names]


def drawn(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator)
    spikes = torch.rand(shape, generator=generator) < 0.01
    return rows + 8 * spikes * torch.randn(shape, generator=generator)


def rope(dim=DIM):
    return Rope(10_000.0 ** -(torch.arange(0, dim, 2) / dim))


def coded_with(mask, rows, scale, book):
    """Quantize rows and keep exactly the numbers of ``mask``."""
    coded = encode_rows(rows, scale, book, torch.zeros_like(rows), 0)
    decoded = decode_rows(coded, scale, book)
    return rows.where(mask, decoded)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_keys_equal_the_official_codes(bits):
    rows, high, low = golden("X", "k_up", "k_lo")
    book, mask, wanted = golden(*(f"k{bits}_{name}" for name in ("lut", "mask", "dq")))
    outside = (rows < low) | (rows > high)
    outside[:SINKS] = True
    assert torch.equal(outside, mask)
    got = coded_with(mask, rows, Scale.of(low, high), book.sort().values)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_values_equal_the_official_codes(bits):
    (rows,) = golden("X")
    book, mask, wanted = golden(*(f"v{bits}_{name}" for name in ("lut", "mask", "dq")))
    scale, outside, distance = inner_range(rows, 0.01)
    assert torch.equal(outside[SINKS:], mask[SINKS:])
    assert (mask[:SINKS]).all()
    outside[:SINKS] = True
    got = coded_with(outside, rows, scale, book.sort().values)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    inner = distance[SINKS:][~mask[SINKS:]].max()
    assert inner <= distance[SINKS:][mask[SINKS:]].min() + 1e-6


def tables(path, bits=3, layers=2, seed=0):
    """Calibrate on drawn rows and read the file back."""
    found = []
    for layer in range(layers):
        keys = drawn((300, HEADS * DIM), seed + layer)
        values = drawn((300, HEADS * DIM), seed + layer + 100)
        ones = torch.ones_like(keys)
        found.append(calibrate_layer(Samples(keys, ones), Samples(values, ones), bits))
    return write_tables(path / "tables.safetensors", found, 0.01)


@pytest.fixture
def codec(tmp_path):
    return KVQuant(tables(tmp_path), cap=0.1).bind(rope())


def test_calibration_is_percentiles_and_a_book(tmp_path):
    rows = drawn((400, 8))
    samples = Samples(rows, torch.ones_like(rows))
    found = calibrate_layer(samples, samples, 2)
    wanted = np.percentile(rows.double().numpy(), [0.5, 99.5], axis=0)
    np.testing.assert_allclose(found.key_low, wanted[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.key_high, wanted[1], rtol=1e-4, atol=1e-5)
    assert found.key_book.shape == found.value_book.shape == (4,)
    assert (found.key_book.abs() < 1).all()
    skewed = Samples(rows, torch.where(rows > 0, 100.0, 1.0))
    assert (calibrate_layer(skewed, samples, 2).key_book >= found.key_book).all()


def encode(codec, tokens=40, dtype=torch.float32, layer=0, **more):
    keys = drawn((HEADS, tokens, DIM), 7).to(dtype)
    values = drawn((HEADS, tokens, DIM), 8).to(dtype)
    positions = torch.arange(tokens)
    draft, residual = codec.encode(
        keys, values, layer=layer, positions=positions, **more
    )
    return keys, values, draft, residual


def test_sinks_are_exact_bit_for_bit(codec):
    keys, values, draft, _ = encode(codec, dtype=torch.bfloat16)
    near = codec.decode(draft)
    assert draft.part_shape.exact_tokens == 4
    assert torch.equal(near[0][:, :4], keys[:, :4])
    assert torch.equal(near[1][:, :4], values[:, :4])
    given = torch.tensor([3, 17, 39])
    keys, values, draft, _ = encode(codec, sinks=given)
    near = codec.decode(draft)
    assert torch.equal(near[0][:, given], keys[:, given])
    assert torch.equal(near[1][:, given], values[:, given])


def test_default_sinks_are_first_positions_not_first_slots(codec):
    keys = drawn((HEADS, 5, DIM))
    positions = torch.tensor([[0, 1, 2, 9, 12], [0, 1, 3, 5, 6]])
    draft, _ = codec.encode(keys, keys, positions=positions)
    assert draft.tensors["sink_slots"].tolist() == [0, 1, 2]
    draft, _ = codec.encode(keys, keys, positions=torch.arange(500, 505))
    assert draft.tensors["sink_slots"].tolist() == []


def test_what_lies_furthest_out_is_exact_and_the_rest_is_nearest(codec):
    keys, values, draft, _ = encode(codec)
    near = codec.decode(draft)
    positions = torch.arange(40)
    pre = rope()(keys, positions, inverse=True).transpose(0, 1).flatten(1)[4:]
    got = rope()(near[0], positions, inverse=True).transpose(0, 1).flatten(1)[4:]
    low, high = codec.tables.key_low[0], codec.tables.key_high[0]
    book = codec.tables.key_books[0]
    grid = book[:, None, None] * ((high - low) / 2) + (high + low) / 2
    error = (pre - got).abs()
    best = (pre - grid).abs().amin(0)
    assert (error <= best + 1e-4).all(), "no entry of the book may be nearer"
    places = codec.draft_layout(draft.part_shape)["key_exact"][1][1]
    outside = (pre < low) | (pre > high)
    few = outside.sum(1) <= places
    assert few.any()
    assert (error[few][outside[few]] < 1e-4).all()
    assert ((error < 1e-4).sum(1) >= places).all()
    inside = got[error > 1e-4]
    limits = (low.expand_as(got)[error > 1e-4], high.expand_as(got)[error > 1e-4])
    assert ((inside >= limits[0]) & (inside <= limits[1])).all()
    rows, got = (x.transpose(0, 1).flatten(1)[4:] for x in (values, near[1]))
    _, outside, _ = inner_range(rows, 0.01)
    assert (rows - got).abs()[outside].max() < 1e-5


def test_more_outliers_than_places_take_the_end_of_the_book(tmp_path):
    codec = KVQuant(tables(tmp_path), cap=0.0, sinks=0).bind(rope())
    keys, _, draft, _ = encode(codec)
    assert draft.tensors["key_exact"].shape == (40, 0)
    pre = rope()(keys, torch.arange(40), inverse=True).transpose(0, 1).flatten(1)
    got = rope()(codec.decode(draft)[0], torch.arange(40), inverse=True)
    got = got.transpose(0, 1).flatten(1)
    scale = codec.tables.key_scale(0)
    above = pre > codec.tables.key_high[0]
    ends = codec.tables.key_books[0][-1] * scale.reach + scale.offset
    torch.testing.assert_close(got[above], ends.expand_as(got)[above])


def test_a_token_depends_on_itself_only(codec):
    keys, values, draft, _ = encode(codec)
    near = codec.decode(draft)
    other = keys.clone()
    other[:, 20:] = 3 * other[:, 20:] + 1
    changed = codec.decode(codec.encode(other, values, positions=torch.arange(40))[0])
    assert torch.equal(changed[0][:, :20], near[0][:, :20])
    assert torch.equal(changed[1], near[1])


def test_dequantized_keys_are_monotone_per_channel(codec):
    scale = codec.tables.key_scale(0)
    rows = torch.linspace(-5, 5, 201)[:, None].expand(-1, HEADS * DIM)
    coded = encode_rows(
        rows, scale, codec.tables.key_books[0], torch.zeros_like(rows), 0
    )
    assert (decode_rows(coded, scale, codec.tables.key_books[0]).diff(dim=0) >= 0).all()


def test_the_order_of_a_stored_book_carries_nothing(tmp_path):
    first = tables(tmp_path)
    second = KVQuantTables.read(first.source)
    torch.testing.assert_close(first.key_books, second.key_books)
    layers = zip(
        first.key_low,
        first.key_high,
        first.key_books.flip(1),
        first.value_books.flip(1),
        strict=True,
    )
    turned = write_tables(tmp_path / "turned.safetensors", list(layers), 0.01)
    assert torch.equal(turned.key_books, first.key_books)
    assert turned.digest != first.digest


def test_a_constant_channel_and_a_constant_row_are_exact(tmp_path):
    keys = torch.full((50, HEADS * DIM), 0.7)
    ones = torch.ones_like(keys)
    values = Samples(drawn(keys.shape), ones)
    found = calibrate_layer(Samples(keys, ones), values, 2)
    built = KVQuant(write_tables(tmp_path / "flat", [found], 0.01), 0.0, 0).bind(rope())
    entries = torch.full((HEADS, 6, DIM), 0.7)
    positions = torch.arange(6)
    turned = rope()(entries, positions)
    near = built.decode(built.encode(turned, entries, positions=positions)[0])
    torch.testing.assert_close(near[0], turned, rtol=0, atol=1e-6)
    assert torch.equal(near[1], entries)


def test_bits_are_codes_places_and_row_scales(codec):
    """bf16: b + 2 places of 16 + 8 bits, two 16-bit stats per value row, 4 sinks."""
    _, _, draft, _ = encode(codec, dtype=torch.bfloat16, tokens=44)
    columns, places = HEADS * DIM, 4  # ceil(0.1 * 32)
    row = 2 * (3 * columns + places * (16 + 8)) + 2 * 16
    sinks = 4 * (2 * columns * 16 + 32)
    assert 8 * draft.nbytes == 40 * row + sinks
    assert draft.bits == codec.draft_bits(draft.part_shape)


def test_wide_rows_name_columns_in_two_bytes(tmp_path):
    columns = 40_000
    flat = NuqRows(
        torch.zeros(1, columns, dtype=torch.uint8),
        torch.tensor([[39_999, 3]]),
        torch.tensor([[5.0, 6.0]]),
    )
    decoded = decode_rows(flat, Scale(torch.zeros(()), torch.ones(())), torch.zeros(2))
    assert decoded[0, [39_999, 3, 0]].tolist() == [5, 6, 0]
    low = torch.full((columns,), -3.0)
    book = torch.tensor([-0.5, 0.5])
    built = KVQuant(
        write_tables(tmp_path / "wide", [(low, -low, book, book)], 0.01), 1e-4, 0
    ).bind(rope(4))
    keys = drawn((10_000, 2, 4))
    keys[9_999, 1] = 50.0
    positions = torch.tensor([0, 0])
    draft, _ = built.encode(keys, keys, positions=positions)
    assert draft.tensors["key_columns"].dtype == torch.int16
    near = built.decode(draft)
    assert torch.equal(near[0][9_999, 1], keys[9_999, 1])
    assert torch.equal(near[1][9_999, 1], keys[9_999, 1])


def test_what_is_missing_is_named(tmp_path):
    found = tables(tmp_path)
    with pytest.raises(CompressionError, match="positions of the keys are needed"):
        KVQuant(found).encode(drawn((HEADS, 5, DIM)), drawn((HEADS, 5, DIM)))
    with pytest.raises(CompressionError, match="not bound to the model's rotation"):
        encode(KVQuant(found))
    bound = KVQuant(found).bind(rope())
    with pytest.raises(CompressionError, match="'key_low' has 2 layers, layer 2 is"):
        encode(bound, layer=2)
    one = drawn((1, 5, DIM))
    with pytest.raises(CompressionError, match="for 32 columns, the keys have 16"):
        bound.encode(one, one, positions=torch.arange(5))
    with pytest.raises(CompressionError, match="cap must be in"):
        KVQuant(found, cap=1.5)
    with pytest.raises(CompressionError, match="sinks must be >= 0"):
        KVQuant(found, sinks=-1)
    for slots in ([3, 3], [2, 1], [-1], [40]):
        with pytest.raises(CompressionError, match="sinks must be ascending slots"):
            encode(bound, sinks=torch.tensor(slots))
