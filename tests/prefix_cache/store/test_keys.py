"""Names and seals: stable over prefixes, never shared by what differs."""

import hashlib
import json
import struct
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_segments import FINGERPRINT

from vericache_sglang.errors import ConfigError
from vericache_sglang.prefix_cache.store.keys import (
    STRIDE,
    WHOLE_FILE,
    Seal,
    compressor_identity,
    model_digest,
    read_key,
    segment_names,
)

SEGMENT = 3
TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)
SPACES = st.lists(st.none() | st.text(max_size=4), max_size=4)


def by_hand(namespace, tokens):
    """The chain as the docstrings say it, value by value."""
    fields = {**asdict(FINGERPRINT), "key": ""}
    text = json.dumps([SEGMENT, fields, namespace], sort_keys=True).encode()
    parent = hashlib.blake2b(text, digest_size=32).digest()
    names = []
    while len(tokens) >= SEGMENT:
        text = parent
        for token in tokens[:SEGMENT]:
            text += struct.pack("<q", token)
        tokens = tokens[SEGMENT:]
        parent = hashlib.blake2b(text, digest_size=20).digest()
        names.append(parent.hex())
    return names


@given(SPACES, TOKENS)
def test_names_are_the_chain_computed_by_hand(space, tokens):
    names = segment_names(FINGERPRINT, space, tokens, SEGMENT)
    assert names == by_hand(space, tokens)


@given(SPACES, TOKENS, TOKENS)
def test_a_longer_prompt_keeps_the_names_of_its_prefix(space, tokens, more):
    names = segment_names(FINGERPRINT, space, tokens, SEGMENT)
    longer = segment_names(FINGERPRINT, space, tokens + more, SEGMENT)
    assert longer[: len(names)] == names
    assert len(longer) == (len(tokens) + len(more)) // SEGMENT


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
def test_namespaces_that_look_alike_share_no_name(one, other):
    names = [segment_names(FINGERPRINT, each, [1], 1) for each in (one, other)]
    assert names[0] != names[1]


def test_segments_of_another_length_have_other_names():
    tokens = list(range(12))
    by_three = segment_names(FINGERPRINT, (), tokens, 3)
    by_six = segment_names(FINGERPRINT, (), tokens, 6)
    assert not set(by_three) & set(by_six)


@pytest.mark.parametrize("field", sorted(asdict(FINGERPRINT)))
def test_every_field_of_a_fingerprint_counts(field):
    value = getattr(FINGERPRINT, field)
    changed = {int: lambda: value + 1, bytes: lambda: b"z" * 32}
    other = replace(FINGERPRINT, **{field: changed.get(type(value), lambda: "z")()})
    assert other.short != FINGERPRINT.short
    names = [segment_names(each, (), [1], 1) for each in (FINGERPRINT, other)]
    assert names[0] != names[1]


def test_names_of_today_are_those_of_tomorrow():
    # Golden: other names would orphan everything that was ever stored.
    assert FINGERPRINT.short == "989c8436c5a70c25"
    assert segment_names(FINGERPRINT, (None, "s"), range(6), 3) == [
        "2fff330d2580a82f07f378aa27da08aeabd9ed55",
        "31e51494e69fa3f275dbe5e414426ec806e553d7",
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
    assert len({one, *others, ""}) == 5
    assert one == compressor_identity("kivi:bits=4", 0.5, "1")


def test_a_key_is_in_every_name_and_in_no_text():
    keyed = replace(FINGERPRINT, key=b"secret" * 6)
    assert not set(segment_names(keyed, (), range(6), 3)) & set(
        segment_names(FINGERPRINT, (), range(6), 3)
    )
    assert "secret" not in repr(keyed)
    assert "secret" not in json.dumps(keyed.fields())


@pytest.mark.parametrize("key", [b"", b"k" * 32, b"k" * 31 + b"l", b"k" * 500])
def test_a_seal_holds_for_its_content_and_key_alone(key):
    seal = Seal(key)
    made = seal.of(b"content")
    assert len(made) == seal.nbytes == (32 if key else 16)
    assert seal.holds(memoryview(b"content"), made)
    assert not seal.holds(b"c0ntent", made)
    others = {Seal(other).of(b"content") for other in (b"", b"k" * 32, b"x" * 32)}
    assert (made in others) == (key in (b"", b"k" * 32))


def key_file(folder, content=b"k" * 32, mode=0o600):
    file = folder / "key"
    file.write_bytes(content)
    file.chmod(mode)
    return str(file)


def test_a_key_is_read_from_a_private_file(tmp_path):
    assert read_key(key_file(tmp_path)) == b"k" * 32
    assert read_key(key_file(tmp_path, b"l" * 100, 0o400)) == b"l" * 100


@pytest.mark.parametrize(
    ("content", "mode", "wanted"),
    [
        (b"k" * 31, 0o600, "32 bytes or more, got 31"),
        (b"k" * 32, 0o640, "mode 0600, got 0640"),
        (b"k" * 32, 0o604, "mode 0600, got 0604"),
    ],
)
def test_a_key_that_protects_nothing_is_refused(tmp_path, content, mode, wanted):
    file = key_file(tmp_path, content, mode)
    with pytest.raises(ConfigError, match=f"--vericache-store-key {file}: .*{wanted}"):
        read_key(file)


def test_a_key_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--vericache-store-key .*absent"):
        read_key(str(tmp_path / "absent"))


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
