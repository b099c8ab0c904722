"""Objects: safetensors back bit by bit, and StoreError alone whatever they hold."""

import json
import math
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from sample_segments import FINGERPRINT, pair_of, same, whole_of

from vericache_sglang.errors import StoreError
from vericache_sglang.prefix_cache.store.objects import (
    DTYPES,
    TensorField,
    decode,
    encode,
    layout,
    most_bytes,
)

TOKENS, KEPT = 8, 3


def buffer_of(data):
    """Copy bytes to a buffer such as a backend fills."""
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]


def fields_of(tensors):
    return {name: TensorField(t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def bits(tensors):
    """Return dtypes, shapes and bytes; NaNs compare too."""
    return {
        name: (t.dtype, t.shape, bytes(t.reshape(-1).view(torch.uint8).tolist()))
        for name, t in tensors.items()
    }


@st.composite
def tensor_dicts(draw):
    tensors = {}
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
    for name in draw(st.sets(names, max_size=4)):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        count = math.prod(shape) * dtype.itemsize
        data = draw(st.binary(min_size=count, max_size=count))
        tensors[name] = buffer_of(data).view(dtype).view(shape)
    return tensors


@given(tensor_dicts())
def test_tensors_come_back_bit_by_bit_and_the_library_reads_them(tensors):
    data = encode(tensors)
    assert bits(load(data.numpy().tobytes())) == bits(tensors)
    assert bits(decode(data, fields_of(tensors), TOKENS)) == bits(tensors)


@given(tensor_dicts())
def test_what_the_library_wrote_is_read(tensors):
    data = buffer_of(save(tensors, {"by": "another"}))
    assert bits(decode(data, fields_of(tensors), TOKENS)) == bits(tensors)


def test_tensors_that_are_not_contiguous_are_stored_in_their_order():
    tensor = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)
    back = decode(
        encode({"t": tensor}), {"t": TensorField(torch.float32, (4, 3, 2))}, 1
    )
    assert back["t"].tolist() == tensor.tolist()


def test_tensors_are_views_of_the_buffer_that_was_read():
    tensors = pair_of(1)["draft"]
    data = encode(tensors)
    home = data.untyped_storage()
    for tensor in decode(data, fields_of(tensors), TOKENS).values():
        assert tensor.untyped_storage().data_ptr() == home.data_ptr()


def test_a_salt_gives_other_bytes_for_the_same_tensors():
    tensors = whole_of(1)["whole"]
    data = [encode(dict(reversed(tensors.items())), salt) for salt in (0, 1, 2)]
    assert encode(tensors).equal(data[0])
    assert len({each.numpy().tobytes() for each in data}) == 3
    for each in data:
        assert same(decode(each, fields_of(tensors), TOKENS), tensors)


def test_bytes_of_today_are_those_of_tomorrow():
    # Golden: other bytes for the same content would be stored beside what is there.
    data = encode({"b": torch.arange(3, dtype=torch.uint8), "a": torch.ones(2)})
    text = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    text += b'"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}'
    begin = struct.pack("<Q", 120) + text.ljust(120)
    assert data.numpy().tobytes() == begin + b"\0\0\x80?\0\0\x80?\0\1\2"


def test_a_dtype_that_could_not_be_read_back_is_refused():
    with pytest.raises(StoreError, match=r"tensor: t.*complex64"):
        encode({"t": torch.zeros(2, dtype=torch.complex64)})


def test_packed_draft_kv_has_a_place_in_the_format():
    """A codec's fields are uint8, by layer; a layout only has to name them."""
    packed = {f"packed.{layer}.codes": torch.arange(7).byte() for layer in range(2)}
    data = encode({**packed, "kept": torch.zeros(2, 2, 0, dtype=torch.int32)})
    fields = {
        f"packed.{layer}.codes": TensorField(torch.uint8, (7,)) for layer in range(2)
    }
    fields["kept"] = TensorField(torch.int32, (2, 2, 0))
    assert same(dict(list(decode(data, fields, TOKENS).items())[1:]), packed)


@pytest.mark.parametrize(
    ("part", "made"),
    [
        ("whole", whole_of(1)),
        ("draft", pair_of(1)),
        ("residual", pair_of(1)),
    ],
)
def test_the_layout_is_what_the_samples_are_made_of(part, made):
    fields = layout(FINGERPRINT, part, TOKENS, KEPT)
    wanted = {name: (t.dtype, tuple(t.shape)) for name, t in made[part].items()}
    required = {name: field[:2] for name, field in fields.items() if field.required}
    assert (
        required.items()
        <= wanted.items()
        <= {name: field[:2] for name, field in fields.items()}.items()
    )
    assert encode(made[part]).numel() <= most_bytes(fields)


# -- what is not believed -------------------------------------------------------

DRAFT = pair_of(1)["draft"]
FIELDS = layout(FINGERPRINT, "draft", TOKENS, KEPT)
BYTES = encode(DRAFT).numpy().tobytes()
(LENGTH,) = struct.unpack("<Q", BYTES[:8])
HEADER, BODY = json.loads(BYTES[8 : 8 + LENGTH]), BYTES[8 + LENGTH :]


def with_header(text, length=None):
    """Give the object another header, and maybe a wrong length of it."""
    begin = struct.pack("<Q", len(text) if length is None else length)
    return buffer_of(begin + text + BODY)


def with_row(name, **changed):
    header = {**HEADER, name: {**HEADER.get(name, {}), **changed}}
    return with_header(json.dumps(header).encode())


def without(name):
    header = {each: row for each, row in HEADER.items() if each != name}
    return with_header(json.dumps(header).encode())


@pytest.mark.parametrize(
    ("data", "differs"),
    [
        (buffer_of(b""), "header"),
        (buffer_of(b"\1\0\0"), "header"),
        (buffer_of(struct.pack("<Q", 0)), "header"),
        (with_header(b"{}", 2**63), "header"),
        (with_header(b"{}", 1 << 21), "header"),
        (with_header(b"[]"), "header"),
        (with_header(b"\xff"), "header"),
        (with_header(b"[" * 100_000), "header"),
        (with_header(b'{"t":' + b"9" * 9999 + b"}"), "header"),
        (without("kept"), "tensor"),
        (without("keys"), "tensor"),
        (with_row("more", dtype="U8", shape=[0], data_offsets=[0, 0]), "tensor"),
        (with_row("keys", dtype="F16"), "tensor"),
        (with_row("keys", dtype=["BF16"]), "tensor"),
        (with_row("keys", shape=[2, 3, 4, 2]), "tensor"),
        (with_row("keys", shape=[2**40, 2**40, 0]), "tensor"),
        (with_row("keys", shape=None), "tensor"),
        (with_row("keys", data_offsets=[-96, 0]), "tensor"),
        (with_row("keys", data_offsets=[10**6, 10**6 + 96]), "tensor"),
        (with_row("keys", data_offsets=[96, 0]), "tensor"),
        (with_row("keys", data_offsets=[0, 94]), "tensor"),
        (with_row("keys", data_offsets=[0, 98]), "tensor"),
        (with_row("keys", data_offsets=[0, 10**400]), "tensor"),
        (with_row("keys", data_offsets=[0.0, 96.0]), "tensor"),
        (with_row("keys", data_offsets={}), "tensor"),
    ],
)
def test_a_header_that_says_otherwise_is_refused(data, differs):
    with pytest.raises(StoreError) as error:
        decode(data, FIELDS, TOKENS)
    assert error.value.differs == differs


def test_a_tensor_at_an_odd_place_is_copied_there():
    text = json.dumps(HEADER).encode()
    data = with_header(text + b" " * (1 - len(text) % 2))
    assert same(decode(data, FIELDS, TOKENS), DRAFT)


@pytest.mark.parametrize(
    "row", [[0, 1, 8], [-1, 1, 2], [2, 1, 0], [1, 1, 2], [0, 1, 2**31 - 1]]
)
def test_kept_positions_ascend_within_the_segment(row):
    kept = torch.arange(KEPT, dtype=torch.int32).repeat(2, 2, 1)
    good = {**DRAFT, "kept": kept.clone()}
    assert decode(encode(good), FIELDS, TOKENS)["kept"].equal(kept)
    kept[1, 0] = torch.tensor(row)
    with pytest.raises(StoreError, match="kept"):
        decode(encode({**DRAFT, "kept": kept}), FIELDS, TOKENS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
SIZES = st.sampled_from([-1, 0, 1, 2, 3, 64, 2**31, 2**62, 2**63, 2**64, 10**400, True])
ROWS = (
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*sorted(DTYPES), "F64", None]),
            "shape": st.lists(SIZES, max_size=9) | JSON,
            "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | JSON,
        }
    )
    | JSON
)
HEADERS = st.dictionaries(st.sampled_from([*HEADER, "noted", "t"]), ROWS) | JSON


@settings(max_examples=200)
@given(HEADERS, st.booleans())
def test_any_header_is_refused_or_its_tensors_lie_in_the_object(header, over):
    if over and isinstance(header, dict):
        header = {**HEADER, **header}
    data = with_header(json.dumps(header).encode())
    tracemalloc.start()
    try:
        tensors = decode(data, FIELDS, TOKENS)
    except StoreError:
        return
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 200_000 + 50 * data.numel()
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {
        name: FIELDS[name][:2] for name in tensors
    }


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_only_our_error(data):
    with pytest.raises(StoreError):
        decode(buffer_of(data), FIELDS, TOKENS)
