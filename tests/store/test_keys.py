"""Names in the store: stable over prefixes, never shared by what differs."""

import hashlib
import json
import struct
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_segments import FINGERPRINT

from vericache_sglang.store.keys import (
    STRIDE,
    WHOLE_FILE,
    compressor_identity,
    compressor_key,
    model_digest,
    root_name,
    segment_names,
)

SEGMENT = 3
TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)
SPACES = st.lists(st.none() | st.text(max_size=4), max_size=4)


def by_hand(namespace, tokens):
    """The chain as the docstrings say it, value by value."""
    fields = json.dumps(asdict(FINGERPRINT), sort_keys=True).encode()
    text = struct.pack("<QQ", SEGMENT, len(fields)) + fields
    text += struct.pack("<Q", len(namespace))
    for item in namespace:
        if item is None:
            text += b"\x00"
        else:
            data = item.encode()
            text += b"\x01" + struct.pack("<Q", len(data)) + data
    parent = hashlib.blake2b(text, digest_size=20, person=b"vericache-root").digest()
    names = []
    while len(tokens) >= SEGMENT:
        text = parent
        for token in tokens[:SEGMENT]:
            text += struct.pack("<q", token)
        tokens = tokens[SEGMENT:]
        parent = hashlib.blake2b(
            text, digest_size=20, person=b"vericache-next"
        ).digest()
        names.append(parent.hex())
    return names


@settings(max_examples=60)
@given(SPACES, TOKENS)
def test_names_are_the_chain_computed_by_hand(space, tokens):
    names = segment_names(FINGERPRINT, space, tokens, SEGMENT)
    assert names == by_hand(space, tokens)


@settings(max_examples=60)
@given(SPACES, TOKENS, TOKENS)
def test_a_longer_prompt_keeps_the_names_of_its_prefix(space, tokens, more):
    names = segment_names(FINGERPRINT, space, tokens, SEGMENT)
    longer = segment_names(FINGERPRINT, space, tokens + more, SEGMENT)
    assert longer[: len(names)] == names
    assert len(longer) == (len(tokens) + len(more)) // SEGMENT


@settings(max_examples=60)
@given(st.data())
def test_one_changed_token_changes_its_name_and_all_that_follow(data):
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=SEGMENT, max_size=20))
    whole = len(tokens) // SEGMENT * SEGMENT
    place = data.draw(st.integers(0, whole - 1))
    other = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    before = segment_names(FINGERPRINT, (), tokens, SEGMENT)
    after = segment_names(FINGERPRINT, (), other, SEGMENT)
    changed = place // SEGMENT
    assert before[:changed] == after[:changed]
    assert not set(before[changed:]) & set(after[changed:])


@settings(max_examples=60)
@given(SPACES, SPACES)
def test_different_namespaces_share_no_name(one, other):
    tokens = list(range(6))
    first = segment_names(FINGERPRINT, one, tokens, SEGMENT)
    second = segment_names(FINGERPRINT, other, tokens, SEGMENT)
    assert (one == other) == bool(set(first) & set(second))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((), (None,)),
        ((None,), ("",)),
        (("ab",), ("a", "b")),
        (("a\0",), ("a", "")),
        ((None, "a"), ("a", None)),
        (("\ud800",), ("\ud801",)),
    ],
)
def test_namespaces_that_look_alike_have_different_roots(one, other):
    assert root_name(FINGERPRINT, one) != root_name(FINGERPRINT, other)


def test_segments_of_another_length_have_other_names():
    tokens = list(range(12))
    by_three = segment_names(FINGERPRINT, (), tokens, 3)
    by_six = segment_names(FINGERPRINT, (), tokens, 6)
    assert not set(by_three) & set(by_six)


@pytest.mark.parametrize("field", sorted(asdict(FINGERPRINT)))
def test_every_field_of_a_fingerprint_counts(field):
    value = getattr(FINGERPRINT, field)
    other = replace(FINGERPRINT, **{field: value + 1 if type(value) is int else "z"})
    assert other.short != FINGERPRINT.short
    assert root_name(other, ()) != root_name(FINGERPRINT, ())


def test_names_of_today_are_those_of_tomorrow():
    # Golden: other names would orphan everything that was ever stored.
    assert FINGERPRINT.short == "8e03ef3160e07db6"
    assert segment_names(FINGERPRINT, (None, "s"), range(6), 3) == [
        "6f4a2162e5a9462033f9fa7740f793868be77ed2",
        "c0ba35e01876dc198882989b7aeab7b984daca66",
    ]


def test_tokens_that_are_no_64_bit_integers_are_refused():
    with pytest.raises(OverflowError):
        segment_names(FINGERPRINT, (), [2**63], 1)
    with pytest.raises(TypeError):
        segment_names(FINGERPRINT, (), [1.0], 1)


def test_identities_of_compressors_are_told_apart():
    one = compressor_identity("kivi:bits=4", 0.5, "1")
    others = [
        compressor_identity("kivi:bits=2", 0.5, "1"),
        compressor_identity("kivi:bits=4", 0.25, "1"),
        compressor_identity("kivi:bits=4", 0.5, "2"),
    ]
    assert len({compressor_key(each) for each in (one, *others, "")}) == 5
    assert compressor_key("") == ""


def model_folder(folder, weights=b"weights", config=b"{}"):
    folder.mkdir()
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_models_digest_follows_its_content_not_its_place(tmp_path):
    same = model_digest(model_folder(tmp_path / "a"))
    assert model_digest(model_folder(tmp_path / "b")) == same
    tuned = model_digest(model_folder(tmp_path / "c", weights=b"weighty"))
    assert tuned != same  # equal names and sizes
    assert model_digest(model_folder(tmp_path / "d", config=b"[]")) != same


def test_a_large_weight_file_is_read_in_every_stride(tmp_path):
    folder = model_folder(tmp_path / "a")
    size = WHOLE_FILE + 2 * STRIDE
    digests = set()
    for changed in (None, 0, 7 * STRIDE, size - STRIDE):
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size)
            if changed is not None:
                file.seek(changed)
                file.write(b"x")
        digests.add(model_digest(folder))
    assert len(digests) == 4


def test_a_folder_without_a_configuration_is_an_error(tmp_path):
    with pytest.raises(OSError, match=r"config\.json"):
        model_digest(tmp_path)
