"""What a request asks in ``custom_params``: read, or refused by the field's name."""

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.errors import ConfigError
from vericache_sglang.runtime.request_options import (
    FIELDS,
    RequestOptions,
    read_options,
)

MOST, INNER = 8, 4
CONFIG = VeriCacheConfig(draft_length=MOST, inner_length=INNER)
DEFAULTS = RequestOptions(True, MOST, report=False, inner=True, inner_length=INNER)


@pytest.mark.parametrize(
    "params", [None, {}, {"other": 1}, {"vericache": {}}, {"vericache": {}, "by": 2.0}]
)
def test_nothing_asked_is_the_servers_own(params):
    assert read_options(params, CONFIG) == DEFAULTS


@pytest.mark.parametrize("length", [1, 4, MOST])
@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_asked_is_what_is_read(enabled, length):
    asked = {"vericache": {"enabled": enabled, "draft_length": length}}
    wanted = replace(DEFAULTS, enabled=enabled, draft_length=length)
    assert read_options(asked, CONFIG) == wanted


@pytest.mark.parametrize("asked", [None, True, 3, "off", ["enabled"]])
def test_wishes_are_an_object(asked):
    with pytest.raises(ConfigError, match=r"custom_params\.vericache must be an obj"):
        read_options({"vericache": asked}, CONFIG)


@pytest.mark.parametrize("name", ["enable", "draft-length", "", "seed"])
def test_an_unknown_field_is_named(name):
    with pytest.raises(ConfigError, match=rf"vericache\.{name} is not known"):
        read_options({"vericache": {"enabled": True, name: 1}}, CONFIG)


@pytest.mark.parametrize("name", ["enabled", "report", "inner"])
@pytest.mark.parametrize("value", [None, 0, 1, "true", [True]])
def test_switches_are_truth_values(name, value):
    with pytest.raises(ConfigError, match=rf"{name} must be true or false"):
        read_options({"vericache": {name: value}}, CONFIG)


def test_figures_in_usage_are_asked_for():
    assert read_options({"vericache": {"report": True}}, CONFIG).report


@pytest.mark.parametrize("name", ["draft_length", "inner_length"])
@pytest.mark.parametrize("value", [None, 0, -1, 1.0, "4", True, [4]])
def test_lengths_are_whole_numbers_from_one(name, value):
    with pytest.raises(ConfigError, match=rf"{name} must be >= 1, got"):
        read_options({"vericache": {name: value}}, CONFIG)


@pytest.mark.parametrize(
    ("name", "most"), [("draft_length", MOST), ("inner_length", INNER)]
)
def test_a_length_beyond_the_servers_is_refused(name, most):
    assert getattr(read_options({"vericache": {name: most}}, CONFIG), name) == most
    refusal = rf"{name} must be at most {most}.*got {most + 1}"
    with pytest.raises(ConfigError, match=refusal):
        read_options({"vericache": {name: most + 1}}, CONFIG)


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
        options = read_options({"vericache": asked}, CONFIG)
    known = isinstance(asked, dict) and asked.keys() <= set(FIELDS)
    assert options is None or (
        known
        and 1 <= options.draft_length <= MOST
        and 1 <= options.inner_length <= INNER
    )
    if asked == {}:
        assert options == DEFAULTS
