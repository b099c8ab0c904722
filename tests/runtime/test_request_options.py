"""What a request asks in ``custom_params``: read, or refused by the field's name."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import ConfigError
from vericache_sglang.runtime.request_options import (
    FIELDS,
    RequestOptions,
    read_options,
)

MOST = 8


@pytest.mark.parametrize(
    "params", [None, {}, {"other": 1}, {"vericache": {}}, {"vericache": {}, "by": 2.0}]
)
def test_nothing_asked_is_the_servers_own(params):
    assert read_options(params, MOST) == RequestOptions(True, MOST, report=False)


@pytest.mark.parametrize("length", [1, 4, MOST])
@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_asked_is_what_is_read(enabled, length):
    asked = {"vericache": {"enabled": enabled, "draft_length": length}}
    assert read_options(asked, MOST) == RequestOptions(enabled, length, report=False)


@pytest.mark.parametrize("asked", [None, True, 3, "off", ["enabled"]])
def test_wishes_are_an_object(asked):
    with pytest.raises(ConfigError, match=r"custom_params\.vericache must be an obj"):
        read_options({"vericache": asked}, MOST)


@pytest.mark.parametrize("name", ["enable", "draft-length", "", "seed"])
def test_an_unknown_field_is_named(name):
    with pytest.raises(ConfigError, match=rf"vericache\.{name} is not known"):
        read_options({"vericache": {"enabled": True, name: 1}}, MOST)


@pytest.mark.parametrize("name", ["enabled", "report", "inner"])
@pytest.mark.parametrize("value", [None, 0, 1, "true", [True]])
def test_switches_are_truth_values(name, value):
    with pytest.raises(ConfigError, match=rf"{name} must be true or false"):
        read_options({"vericache": {name: value}}, MOST)


def test_figures_in_usage_are_asked_for():
    assert read_options({"vericache": {"report": True}}, MOST).report


@pytest.mark.parametrize("value", [None, 0, -1, 1.0, "4", True, [4]])
def test_draft_length_is_a_whole_number_from_one(value):
    with pytest.raises(ConfigError, match=r"draft_length must be >= 1, got"):
        read_options({"vericache": {"draft_length": value}}, MOST)


def test_a_draft_longer_than_the_servers_is_refused():
    with pytest.raises(ConfigError, match=r"draft_length must be at most 8.*got 9"):
        read_options({"vericache": {"draft_length": MOST + 1}}, MOST)


def test_a_refusal_is_a_value_error():
    """SGLang answers 400 to those."""
    assert issubclass(ConfigError, ValueError)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
wishes = st.dictionaries(st.sampled_from([*FIELDS, "x"]), json_values, max_size=3)


@settings(deadline=None)
@given(json_values | wishes)
def test_whatever_is_sent_is_read_or_refused(asked):
    options = None
    with suppress(ConfigError):
        options = read_options({"vericache": asked}, MOST)
    known = isinstance(asked, dict) and asked.keys() <= set(FIELDS)
    assert options is None or (known and 1 <= options.draft_length <= MOST)
    if asked == {}:
        assert options == RequestOptions(True, MOST, report=False)
