"""What every codec promises: sizes, exact joins, refusals, and its line of text."""

import dataclasses

import pytest
import torch

from vericache_sglang.compression.codecs.base import CODECS
from vericache_sglang.compression.codecs.catalog import OURS, create_codec
from vericache_sglang.compression.codecs.kvquant_tables import (
    Samples,
    calibrate_layer,
)
from vericache_sglang.compression.codecs.kvquant_tables import (
    write_tables as write_kvquant,
)
from vericache_sglang.compression.codecs.rope import Rope
from vericache_sglang.compression.codecs.rotatekv_tables import (
    write_tables as write_rotatekv,
)
from vericache_sglang.errors import CompressionError, ConfigError

HEADS, DIM = 4, 32
LINES = [
    "split-planes:exponent_bits=4,mantissa_bits=3",
    "split-planes:exponent_bits=3,mantissa_bits=1,block=16",
    "kivi:bits=2,group=32,window=32",
    "kivi:bits=3,group=16,window=64",
    "kvquant:tables={kvquant},cap=0.05",
    "rotatekv:tables={rotatekv},group=32,bits=3,clip=1.0",
    "turboquant:bits=3",
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INTEGERS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write one calibration of each kind."""
    folder = tmp_path_factory.mktemp("tables")
    rows = torch.randn(200, HEADS * DIM, generator=torch.Generator().manual_seed(0))
    samples = Samples(rows, torch.ones_like(rows))
    layer = calibrate_layer(samples, samples, 3)
    write_kvquant(folder / "kvquant", [layer], 0.01)
    write_rotatekv(folder / "rotatekv", [torch.arange(HEADS * DIM)], HEADS)
    return {name: str(folder / name) for name in ("kvquant", "rotatekv")}


def built(line, files):
    frequencies = 10_000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    return create_codec(line.format(**files)).bind(Rope(frequencies))


def drawn(tokens, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    entries = torch.randn(2, HEADS, tokens, DIM, generator=generator).to(dtype)
    return entries[0], entries[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 31, 100])
@pytest.mark.parametrize("line", LINES)
def test_every_codec_keeps_its_contract(line, tokens, dtype, files):
    codec = built(line, files)
    keys, values = drawn(tokens, dtype)
    before = keys.clone(), values.clone()
    positions = torch.arange(10, 10 + tokens)
    draft, residual = codec.encode(keys, values, positions=positions)
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])
    elements = 2 * HEADS * tokens * DIM
    assert draft.part_shape == residual.part_shape
    assert draft.part_shape.elements == elements
    assert (
        draft.bits == codec.draft_bits(draft.part_shape) == 8 * draft.nbytes / elements
    )
    fraction = residual.nbytes / (keys.nbytes + values.nbytes)
    assert codec.transfer_fraction(residual.part_shape) == fraction <= 1
    for part, layout in (
        (draft, codec.draft_layout(draft.part_shape)),
        (residual, codec.residual_layout(draft.part_shape)),
    ):
        found = {name: (t.dtype, tuple(t.shape)) for name, t in part.tensors.items()}
        assert found == layout
    near = codec.decode(draft)
    for entries, approximate in zip((keys, values), near, strict=True):
        assert approximate.shape == entries.shape
        assert approximate.dtype == dtype
        error = (approximate.double() - entries.double()).norm()
        assert error < 0.6 * entries.double().norm()
    for entries, joined in zip(
        (keys, values), codec.join(draft, residual), strict=True
    ):
        integer = INTEGERS[dtype.itemsize]
        assert torch.equal(joined.view(integer), entries.view(integer))


@pytest.mark.parametrize("line", LINES)
def test_a_draft_part_can_be_encoded_alone(line, files):
    codec = built(line, files)
    keys, values = drawn(100, torch.bfloat16)
    given = {"positions": torch.arange(100), "sinks": torch.tensor([0, 7])}
    draft, _ = codec.encode(keys, values, **given)
    alone = codec.encode_draft(keys, values, **given)
    assert alone.part_shape == dataclasses.replace(draft.part_shape, escapes=0)
    assert alone.tensors.keys() == draft.tensors.keys()
    for name, tensor in alone.tensors.items():
        assert torch.equal(tensor, draft.tensors[name])


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(("first", "heads"), [(0, 2), (2, 2), (1, 1), (0, 4)])
def test_some_heads_have_a_codec_of_their_own(line, first, heads, files):
    """Ranks have their heads' tables; of codes that mix heads they mix their own."""
    codec = built(line, files)
    cut = codec.of_heads(first, heads, HEADS)
    keys, values = (each[first : first + heads] for each in drawn(64, torch.float32))
    draft, residual = cut.encode(keys, values, positions=torch.arange(64))
    for entries, near in zip((keys, values), cut.decode(draft), strict=True):
        assert (near - entries).norm() < 0.6 * entries.norm()
    for entries, exact in zip((keys, values), cut.join(draft, residual), strict=True):
        assert torch.equal(entries, exact)
    whole = heads == HEADS or not codec.needs.artifact
    assert (cut.identity == codec.identity) is whole, "others' parts mean nothing"


def test_tables_are_cut_by_head(files):
    kvquant, rotatekv = (built(line, files).tables for line in LINES[4:6])
    own = slice(2 * DIM, 4 * DIM)
    assert torch.equal(kvquant.of_heads(2, 2, 4).key_low, kvquant.key_low[:, own])
    assert torch.equal(kvquant.of_heads(2, 2, 4).key_books, kvquant.key_books)
    order = torch.randperm(HEADS * DIM, generator=torch.Generator().manual_seed(3))
    shuffled = dataclasses.replace(rotatekv, order=order[None])
    wanted = [i - 2 * DIM for i in order.tolist() if i >= 2 * DIM]
    assert shuffled.of_heads(2, 2, 4).order.tolist() == [wanted]
    assert [shuffled.of_heads(0, n, 4).rotated_heads for n in (1, 2, 4)] == [1, 2, 4]


@pytest.mark.parametrize("line", LINES)
def test_every_bit_pattern_can_be_encoded_and_joined(line, files):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**15), 2**15, (2, HEADS, 40, DIM), generator=generator)
    keys, values = bits.to(torch.int16).view(torch.bfloat16)
    codec = built(line, files)
    draft, residual = codec.encode(keys, values, positions=torch.arange(40))
    assert codec.decode(draft)[0].shape == keys.shape
    joined = codec.join(draft, residual)
    assert torch.equal(joined[0].view(torch.int16), keys.view(torch.int16))
    assert torch.equal(joined[1].view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize(
    ("keys", "values", "says"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 3), r"keys must be \[heads, tokens, dim\]"),
        (torch.zeros(4, 0, 32), torch.zeros(4, 0, 32), r"keys must be \[heads"),
        (torch.zeros(4, 3, 32), torch.zeros(4, 2, 32), "do not go with keys"),
        (torch.zeros(4, 3, 32), torch.zeros(4, 3, 32).half(), "do not go with keys"),
        (torch.zeros(4, 3, 32).int(), torch.zeros(4, 3, 32), "keys must be bfloat16"),
        (torch.zeros(4, 3, 32), torch.zeros(4, 3, 32).double(), "values must be bfl"),
    ],
)
def test_wrong_kv_is_refused(keys, values, says, files):
    with pytest.raises(CompressionError, match=says):
        built(LINES[2], files).encode(keys, values, positions=torch.arange(3))


@pytest.mark.parametrize("line", LINES)
def test_wrong_positions_and_parts_are_refused(line, files):
    codec = built(line, files)
    keys, values = drawn(40, torch.bfloat16)
    with pytest.raises(
        CompressionError, match=r"positions must be \[40\] or \[4, 40\]"
    ):
        codec.encode(keys, values, positions=torch.arange(39))
    draft, residual = codec.encode(keys, values, positions=torch.arange(40))
    with pytest.raises(CompressionError, match="draft was written by other, not by"):
        codec.decode(dataclasses.replace(draft, codec="other"))
    for field, tensor in draft.tensors.items():
        wrong = dataclasses.replace(
            draft, tensors={**draft.tensors, field: tensor[..., None]}
        )
        with pytest.raises(CompressionError, match=f"draft: field '{field}' should be"):
            codec.decode(wrong)
        missing = {k: t for k, t in draft.tensors.items() if k != field}
        with pytest.raises(CompressionError, match=f"field '{field}' .* is absent"):
            codec.decode(dataclasses.replace(draft, tensors=missing))
    other = dataclasses.replace(residual, layer=3)
    with pytest.raises(CompressionError, match="do not belong together"):
        codec.join(draft, other)
    field, tensor = next(iter(residual.tensors.items()))
    wrong = dataclasses.replace(
        residual, tensors={**residual.tensors, field: tensor[..., :-1]}
    )
    with pytest.raises(CompressionError, match=f"residual: field '{field}' should be"):
        codec.join(draft, wrong)


def test_identities_name_everything_that_matters(files):
    identities = {built(line, files).identity for line in LINES}
    assert len(identities) == len(LINES)
    assert built(LINES[1], files).identity == (
        "split-planes@1(exponent_bits=3,mantissa_bits=1,block=16)"
    )
    kvquant = built(LINES[4], files)
    assert f"tables={kvquant.tables.digest}" in kvquant.identity
    assert "rope" not in kvquant.identity


def test_every_codec_of_ours_is_registered_under_its_name():
    assert {codec.name: codec for codec in OURS} == {
        name: CODECS[name] for name in CODECS.names()
    }
    assert {line.partition(":")[0] for line in LINES} == set(CODECS.names())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("zip", "unknown codec 'zip'; known: kivi, kvquant, rotatekv"),
        ("kivi:width=3", "unknown or repeated parameter 'width'; known: bits, group"),
    ],
)
def test_lines_that_name_nothing_are_refused(line, says):
    """How options are read is tested by the lines of test_catalog.py."""
    with pytest.raises(ConfigError, match=says):
        create_codec(line)


def test_needs_say_what_the_runtime_must_bring(files):
    needs = {line: built(line, files).needs for line in LINES}
    assert needs[LINES[0]].token_align == 64
    assert needs[LINES[3]].token_align == 16
    assert [line for line in LINES if needs[line].rope] == LINES[4:6]
    assert [n.artifact for n in needs.values() if n.artifact] == [
        "kvquant-tables",
        "rotatekv-tables",
    ]
