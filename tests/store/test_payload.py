"""Objects in bytes: back bit by bit, and nothing but StoreError whatever they hold."""

import json
import struct
import tracemalloc
from dataclasses import asdict, replace

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_segments import FINGERPRINT, KIVI, SNAPKV, about, bit_flipped, same

from vericache_sglang.errors import StoreError
from vericache_sglang.store.payload import (
    DTYPES,
    Expect,
    Label,
    decode,
    encode,
    pair_of,
)

LABEL = Label("name", "draft", "pair", about(KIVI))
EXPECT = Expect(FINGERPRINT, "name", "draft", KIVI, "pair")


def buffer_of(data):
    """Copy bytes to a buffer such as a backend fills."""
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]


def by_hand(data):
    """Parse an object with struct and json alone: header and raw bytes by tensor."""
    assert data[:4] == b"VCKV"
    version, header_bytes, total = struct.unpack("<HxxIQ", data[4:20])
    assert (version, total) == (1, len(data))
    assert xxhash.xxh3_128_digest(data[:-16]) == data[-16:]
    header = json.loads(data[20 : 20 + header_bytes])
    body = (20 + header_bytes + 63) // 64 * 64
    raw = {}
    for name, dtype, shape, offset in header["tensors"]:
        size = DTYPES[dtype].itemsize
        for dim in shape:
            size *= dim
        raw[name] = data[body + offset : body + offset + size]
    return header, raw


def raw_bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@st.composite
def tensor_dicts(draw):
    tensors = {}
    for name in draw(st.sets(st.text(max_size=3), max_size=4)):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        count = dtype.itemsize
        for dim in shape:
            count *= dim
        data = draw(st.binary(min_size=count, max_size=count))
        tensors[name] = buffer_of(data).view(dtype).view(shape)
    return tensors


@settings(max_examples=60)
@given(tensor_dicts())
def test_tensors_come_back_bit_by_bit(tensors):
    data = encode(FINGERPRINT, LABEL, tensors)
    header, raw = by_hand(data.numpy().tobytes())
    assert raw == {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    assert header["fingerprint"] == asdict(FINGERPRINT)
    payload = decode(data, EXPECT)
    assert payload.label == LABEL
    assert payload.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = payload.tensors[name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert raw_bytes(back) == raw_bytes(tensor)


def test_tensors_that_are_not_contiguous_are_stored_in_their_order():
    tensor = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)
    back = decode(encode(FINGERPRINT, LABEL, {"t": tensor}), EXPECT).tensors["t"]
    assert back.tolist() == tensor.tolist()


def test_tensors_are_views_of_the_buffer_that_was_read():
    data = encode(FINGERPRINT, LABEL, {"t": torch.arange(100)})
    back = decode(data, EXPECT).tensors["t"]
    assert back.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
    assert back.data_ptr() % 64 == 0


def test_equal_arguments_give_equal_bytes():
    one = encode(FINGERPRINT, LABEL, {"a": torch.ones(3), "b": torch.zeros(2)})
    other = encode(FINGERPRINT, LABEL, {"b": torch.zeros(2), "a": torch.ones(3)})
    assert one.equal(other)


def test_a_pair_is_named_by_all_of_its_content():
    parts = {"draft": {"a": torch.ones(3)}, "rest": {"a": torch.zeros(3)}}
    others = [
        {"draft": parts["rest"], "rest": parts["draft"]},
        {"draft": {"b": torch.ones(3)}, "rest": parts["rest"]},
        {"draft": {"a": torch.ones(3, 1)}, "rest": parts["rest"]},
        {"draft": parts["draft"], "rest": {"a": torch.tensor([0.0, 0.0, -0.0])}},
    ]
    assert len({pair_of(each) for each in (parts, *others)}) == 5
    assert pair_of(dict(reversed(parts.items()))) == pair_of(parts)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, dtype=torch.complex64), torch.zeros([1] * 9)]
)
def test_tensors_that_could_not_be_read_back_are_refused(tensor):
    with pytest.raises(StoreError, match="tensor: t"):
        encode(FINGERPRINT, LABEL, {"t": tensor})


@pytest.mark.parametrize(
    ("expect", "differs"),
    [
        (replace(EXPECT, name="other"), "name"),
        (replace(EXPECT, part="rest"), "part"),
        (replace(EXPECT, compressor=SNAPKV), "compressor"),
        (replace(EXPECT, pair="other"), "pair"),
        (replace(EXPECT, fingerprint=replace(FINGERPRINT, layers=3)), "fingerprint"),
    ],
)
def test_another_object_is_told_by_what_differs(expect, differs):
    data = encode(FINGERPRINT, LABEL, {"t": torch.ones(3)})
    assert decode(data, replace(EXPECT, compressor=None, pair=None)).label == LABEL
    with pytest.raises(StoreError, match=f"^{differs}: ") as error:
        decode(data, expect)
    assert error.value.differs == differs


def test_the_fields_of_a_foreign_fingerprint_are_named():
    data = encode(replace(FINGERPRINT, kv_heads=9), LABEL, {})
    with pytest.raises(StoreError, match=r"kv_heads.*\(2, 9\)"):
        decode(data, EXPECT)


OBJECT = encode(FINGERPRINT, LABEL, {"t": torch.arange(40), "u": torch.ones(3)})
BYTES = OBJECT.numpy().tobytes()
GOLDEN = (912, "8addd41b1ac192936f68dba98ab4e87c")


def test_bytes_of_today_are_those_of_tomorrow():
    # Golden: other bytes for the same content would be stored beside what is there.
    assert (len(BYTES), BYTES[-16:].hex()) == GOLDEN


@settings(max_examples=60)
@given(st.integers(0, len(BYTES) * 8 - 1))
def test_any_flipped_bit_is_seen(bit):
    with pytest.raises(StoreError):
        decode(buffer_of(bit_flipped(BYTES, bit)), EXPECT)


def test_any_length_but_the_right_one_is_seen():
    for length in range(len(BYTES)):
        with pytest.raises(StoreError):
            decode(buffer_of(BYTES[:length]), EXPECT)
    with pytest.raises(StoreError, match="length"):
        decode(buffer_of(BYTES + b"\0"), EXPECT)


@settings(max_examples=60)
@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_raise_only_our_error(data, with_magic):
    with pytest.raises(StoreError):
        decode(buffer_of(b"VCKV\1\0\0\0" * with_magic + data), EXPECT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
SIZES = st.sampled_from([-1, 0, 1, 2, 3, 64, 2**31, 2**62, 2**63, 2**64, 10**400, True])
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["t", "u", "", 3]),
        st.sampled_from(["float32", "int64", "uint8", "bool", "object", None]),
        st.lists(SIZES, max_size=9) | JSON,
        SIZES,
    ).map(list)
    | JSON,
    max_size=3,
)


def resealed(text):
    """Give an object another header and the checksum that goes with it."""
    begin = (20 + len(text) + 63) // 64 * 64
    body = BYTES[-16 - 384 : -16]
    total = begin + len(body) + 16
    data = struct.pack("<4sHxxIQ", b"VCKV", 1, len(text), total) + text
    data += bytes(begin - len(data)) + body
    return buffer_of(data + xxhash.xxh3_128_digest(data))


def header_with(field, value):
    header, _ = by_hand(BYTES)
    return json.dumps(header | {field: value}).encode()


def decode_or_refuse(buffer):
    """Decode; what comes back lies in the buffer, and little else was allocated."""
    tracemalloc.start()
    try:
        payload = decode(buffer, EXPECT)
    except StoreError:
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 200_000 + 50 * buffer.numel()
    home = buffer.untyped_storage()
    for tensor in payload.tensors.values():
        assert tensor.untyped_storage().data_ptr() == home.data_ptr()
        last = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        assert last <= home.nbytes()
    return payload


@settings(max_examples=60)
@given(ROWS | JSON)
def test_a_sealed_table_of_tensors_is_not_believed(rows):
    decode_or_refuse(resealed(header_with("tensors", rows)))


@settings(max_examples=60)
@given(st.sampled_from(sorted(by_hand(BYTES)[0])), JSON)
def test_a_sealed_header_with_any_field_changed_is_not_believed(field, value):
    payload = decode_or_refuse(resealed(header_with(field, value)))
    if payload is not None:
        assert (payload.label.name, payload.label.part) == ("name", "draft")


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"tensors":' + b"9" * 9999 + b"}"]
)
def test_a_sealed_header_that_is_no_object_is_refused(text):
    with pytest.raises(StoreError, match="header"):
        decode(resealed(text), EXPECT)


def test_a_sealed_object_with_its_own_header_is_believed():
    payload = decode_or_refuse(resealed(header_with("pair", "pair")))
    assert same(payload.tensors, decode(OBJECT, EXPECT).tensors)


@pytest.mark.parametrize(
    "row",
    [
        ["t", "float32", [1], -64],
        ["t", "float32", [97], 0],
        ["t", "float32", [1], 384],
        ["t", "float32", [1], 4],
        ["t", "int64", [-1, -2], 0],
        ["t", "uint8", [2**40, 2**40, 0], 0],
        ["t", "object", [1], 0],
        ["t", "float32", [1]],
    ],
)
def test_a_tensor_outside_of_the_body_is_refused(row):
    with pytest.raises(StoreError, match="tensor"):
        decode(resealed(header_with("tensors", [row])), EXPECT)
