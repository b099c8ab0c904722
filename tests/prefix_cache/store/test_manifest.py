"""Manifests: of one size, back as they were, believed only within their bounds."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_segments import bit_flipped

from vericache_sglang.errors import StoreError
from vericache_sglang.prefix_cache.store.keys import Seal
from vericache_sglang.prefix_cache.store.manifest import (
    MANIFEST_BYTES,
    Manifest,
    Stored,
    decode_manifest,
)

SEALS = {False: Seal(), True: Seal(b"k" * 32)}


def manifest(keyed=False, whole=False):
    """A manifest as long as any."""
    digest = "0123456789abcdef" * (4 if keyed else 2)
    parts = ("whole",) if whole else ("draft", "residual")
    return Manifest(
        model="f" * 16,
        name="e" * 40,
        compressor="" if whole else "d" * 16,
        tokens=512,
        kept=0 if whole else 128,
        objects={part: Stored(10**12, digest) for part in parts},
    )


def buffer_of(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def sealed(**said):
    """Seal a manifest that says anything."""
    text = manifest(whole=said.pop("whole", False)).encode(SEALS[False])
    header = json.loads(text.numpy().tobytes()[:-16]) | said
    text = json.dumps(header).encode().ljust(MANIFEST_BYTES - 16)
    return buffer_of(text + SEALS[False].of(text))


def read(data, keyed=False):
    return decode_manifest(data, SEALS[keyed], "f" * 16, "e" * 40)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_manifest_comes_back_and_has_its_size(keyed, whole):
    data = manifest(keyed, whole).encode(SEALS[keyed])
    assert data.numel() == MANIFEST_BYTES
    assert read(data, keyed) == manifest(keyed, whole)


@given(st.integers(0, MANIFEST_BYTES * 8 - 1), st.booleans())
def test_any_flipped_bit_is_seen(bit, keyed):
    data = manifest(keyed).encode(SEALS[keyed]).numpy().tobytes()
    with pytest.raises(StoreError, match="checksum"):
        read(buffer_of(bit_flipped(data, bit)), keyed)


def test_without_the_key_no_seal_is_made_nor_broken():
    data = manifest().encode(SEALS[False])
    for seal in (SEALS[True], Seal(b"x" * 32)):
        with pytest.raises(StoreError, match="checksum"):
            decode_manifest(data, seal, "f" * 16, "e" * 40)


def test_a_manifest_of_another_model_or_segment_is_told():
    for changed in ({"model": "0" * 16}, {"name": "0" * 40}):
        data = replace(manifest(), **changed).encode(SEALS[False])
        with pytest.raises(StoreError, match=r"^name") as error:
            read(data)
        assert error.value.differs == "name"


HEX = "0123456789abcdef" * 2
ONE = {"draft": [9, HEX]}


@pytest.mark.parametrize(
    "said",
    [
        {"tokens": 0},
        {"tokens": 513},
        {"tokens": True},
        {"tokens": 8.0},
        {"kept": -1},
        {"kept": 513},
        {"kept": None},
        {"tokens": 100, "kept": 101},
        {"compressor": ""},
        {"compressor": 7},
        {"whole": True, "compressor": "d"},
        {"objects": None},
        {"objects": {}},
        {"objects": ["draft", "residual"]},
        {"objects": ONE},
        {"objects": {**ONE, "residual": [9, HEX], "whole": [9, HEX]}},
        {"objects": {**ONE, "residual": [0, HEX]}},
        {"objects": {**ONE, "residual": [9.5, HEX]}},
        {"objects": {**ONE, "residual": [9, HEX[1:]]}},
        {"objects": {**ONE, "residual": [9, "../" + HEX[3:]]}},
        {"objects": {**ONE, "residual": [9, HEX.upper()]}},
        {"objects": {**ONE, "residual": [9, HEX[1:] + "\n"]}},
        {"objects": {**ONE, "residual": [9]}},
        {"objects": {**ONE, "residual": None}},
    ],
)
def test_a_sealed_manifest_is_not_believed_beyond_its_bounds(said):
    assert read(sealed()) == manifest()
    with pytest.raises(StoreError, match="header"):
        read(sealed(**said))


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"[" * 900, b"9" * 900])
def test_a_sealed_text_that_is_no_object_is_refused(text):
    text = text.ljust(MANIFEST_BYTES - 16)
    with pytest.raises(StoreError, match="header"):
        read(buffer_of(text + SEALS[False].of(text)))


def test_keys_name_objects_by_their_content():
    digest = "0123456789abcdef" * 2
    key = "f" * 16 + "." + digest
    assert manifest().keys() == {"draft": key, "residual": key}
    assert manifest().keys("draft") == {"draft": key}
    assert manifest(whole=True).keys("draft") == {}
