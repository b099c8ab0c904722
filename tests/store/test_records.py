"""Records: of one size, back as they were, believed only within their bounds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import StoreError
from vericache_sglang.store.frame import new_frame, seal
from vericache_sglang.store.records import (
    MOST_OBJECT_BYTES,
    RECORD_BYTES,
    Record,
    Stored,
    decode_record,
    encode_record,
    held,
    object_key,
    record_key,
)

HEX = "0123456789abcdef" * 2
GOOD = ["draft", 100, HEX, 0]


def sealed(objects):
    """Seal a record that says anything about its objects."""
    header = {
        "fingerprint": "model",
        "name": "name",
        "compressor": "",
        "pair": "",
        "objects": objects,
    }
    frame, _ = new_frame(header, 0)
    seal(frame)
    return frame


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            Stored,
            st.sampled_from(["whole", "draft", "rest"]),
            st.integers(36, MOST_OBJECT_BYTES),
            st.just(HEX),
            st.integers(0, 7),
        ),
        max_size=3,
    )
)
def test_a_record_comes_back_and_has_its_size(objects):
    record = Record("0123456789abcdef", HEX, tuple(objects))
    data = encode_record("0" * 16, "n" * 40, record)
    assert data.numel() == RECORD_BYTES
    assert decode_record(data, "0" * 16, "n" * 40) == record


def test_a_record_of_another_model_or_segment_is_told():
    data = encode_record("model", "name", Record("", "", ()))
    with pytest.raises(StoreError, match=r"^fingerprint"):
        decode_record(data, "other", "name")
    with pytest.raises(StoreError, match=r"^name"):
        decode_record(data, "model", "other")


@pytest.mark.parametrize(
    "row",
    [
        [*GOOD[:1], MOST_OBJECT_BYTES + 1, *GOOD[2:]],
        [*GOOD[:1], 35, *GOOD[2:]],
        [*GOOD[:1], True, *GOOD[2:]],
        [*GOOD[:3], -1],
        ["half", *GOOD[1:]],
        [["draft"], *GOOD[1:]],
        [*GOOD[:2], 7, 0],
        GOOD[:3],
        None,
    ],
)
def test_a_sealed_record_is_not_believed_beyond_its_bounds(row):
    assert decode_record(sealed([GOOD]), "model", "name").objects[0].nbytes == 100
    with pytest.raises(StoreError, match="header"):
        decode_record(sealed([GOOD, row]), "model", "name")


def test_objects_are_sorted_by_what_they_may_be_joined_with():
    one, other = Stored("draft", 99, "a"), Stored("draft", 99, "b")
    rest = Stored("rest", 99, "c")
    records = [
        Record("kivi", "new", (other,)),
        Record("kivi", "old", (rest,)),
        Record("kivi", "old", (one, rest)),
    ]
    found = held(records)
    assert list(found) == [("kivi", "new"), ("kivi", "old")]
    assert found["kivi", "new"] == {"draft": [other]}
    assert found["kivi", "old"] == {"draft": [one], "rest": [rest]}


def test_keys_of_today_are_those_of_tomorrow():
    assert record_key("f", "n", 3) == "f.n.record.3"
    assert object_key("f", "n", Stored("rest", 99, "ab", 1)) == "f.n.rest.ab.1"
