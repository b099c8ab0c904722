"""The settings: defaults, bounds, the boot line, the staging size."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vericache_sglang.config.schema import (
    VeriCacheConfig,
    boot_line,
    fields,
    flag,
    resolve_host,
    resolve_staging,
)
from vericache_sglang.errors import ConfigError

BAD_VALUES = [
    ("compressor", ""),
    ("compressor", 3),
    ("keep", 0),
    ("keep", -0.5),
    ("keep", 1.01),
    ("keep", math.nan),
    ("keep", math.inf),
    ("keep", "0.5"),
    ("draft_length", 0),
    ("draft_length", 257),
    ("draft_length", 4.0),
    ("draft_length", True),
    ("draft_length", None),
    ("max_verifies", 0),
    ("max_verifies", 65),
    ("residency", "remote"),
    ("pacing", "random"),
    ("horizon", 7),
    ("min_prompt", 0),
    ("sink_tokens", -1),
    ("recent_tokens", -1),
    ("staging_tokens", -64),
    ("host_gb", -1),
    ("host_gb", 10**400),
    ("link_gbps", -0.1),
    ("store_key", ""),
    ("store_shared_folder", "yes"),
    ("store_shared_folder", True),
    ("draft_first", "yes"),
    ("live_page", "maybe"),
    ("seed", -1),
    ("seed", 2**63),
    ("acceptance", "typical"),
    ("inner", "eagle"),
    ("inner_length", 0),
    ("inner_length", 17),
    ("inner_corpus", -1),
    ("inner_window", 63),
    ("consistency_check_rate", 1.5),
    ("trace", ""),
    ("trace_mb", -1),
    ("role", "prefill"),
    ("peer_bind", ""),
    ("verifiers", 3),
    ("peer_key", ""),
    ("lease_s", 0.5),
    ("max_guests", 0),
    ("guest_kv", "kept"),
    ("remote_path", "p3"),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_names_its_field_and_flag(name, value):
    with pytest.raises(ConfigError) as caught:
        VeriCacheConfig(**{name: value})
    assert name in str(caught.value)
    assert flag(name) in str(caught.value)
    assert "the default is" in str(caught.value)


def test_every_wrong_value_is_in_the_message():
    with pytest.raises(ConfigError, match=r"keep .*got 2.*; draft_length .*got 'x'"):
        VeriCacheConfig(keep=2, draft_length="x")


def test_every_field_has_a_bad_value_above():
    assert {name for name, _ in BAD_VALUES} == set(fields())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep", 1),
        ("draft_length", 1),
        ("draft_length", 256),
        ("max_verifies", 64),
        ("min_prompt", 1),
        ("sink_tokens", 0),
        ("recent_tokens", 0),
        ("host_gb", 0),
        ("host_gb", 0.001),
        ("link_gbps", 0),
        ("seed", 2**63 - 1),
    ],
)
def test_the_bounds_themselves_are_allowed(name, value):
    assert getattr(VeriCacheConfig(**{name: value}), name) == value


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        VeriCacheConfig().keep = 0.5


@pytest.mark.parametrize(
    ("given", "free", "ranks", "gib"),
    [
        (3.5, 64 << 30, 8, 3.5),
        (0, 64 << 30, 1, 16.0),
        (0, 64 << 30, 4, 4.0),
        (0, (1 << 30) + 12345, 1, 0.25),
        (0, 100, 1, 1 / 1024),
    ],
)
def test_host_memory_is_a_ranks_part_of_a_quarter_unless_given(given, free, ranks, gib):
    assert resolve_host(VeriCacheConfig(host_gb=given), free, ranks) == gib


def test_boot_line_shows_every_setting():
    assert boot_line(VeriCacheConfig(keep=0.5)) == (
        "VeriCache: compressor=snapkv keep=0.5 draft_length=31 max_verifies=2 "
        "residency=auto pacing=staggered horizon=64 min_prompt=2048 sink_tokens=4 "
        "recent_tokens=32 staging_tokens=0 host_gb=0.0 "
        "link_gbps=0.0 store_key=off store_shared_folder=off draft_first=off "
        "seed=0 acceptance=coupled inner=none inner_length=4 inner_corpus=65536 "
        "inner_window=512 consistency_check_rate=0.0 trace=off trace_mb=1024 "
        "live_page=on role=standalone peer_bind=off verifiers=off peer_key=off "
        "lease_s=10.0 max_guests=256 guest_kv=auto remote_path=b1"
    )


@pytest.mark.parametrize(
    ("settings", "context", "slots"),
    [
        ({}, 16384, 24576),
        ({"keep": 0.5, "max_verifies": 1}, 1000, 512),
        ({"keep": 0.5, "max_verifies": 1}, 1, 64),
        ({"keep": 1.0}, 16384, 0),
        ({"max_verifies": 64}, 131072, 65536),
        ({"staging_tokens": 100}, 16384, 128),
        ({"staging_tokens": 262144}, 16384, 262144),
    ],
    ids=["default", "rounded", "one", "all-kept", "ceiling", "by-hand", "above"],
)
def test_staging_size(settings, context, slots):
    assert resolve_staging(VeriCacheConfig(**settings), context) == slots


@pytest.mark.parametrize(
    ("settings", "pool", "slots"),
    [
        ({}, 10**6, 24576),
        ({}, 40_000, 10_048),
        ({}, 0, 0),
        ({"staging_tokens": 9000}, 10_000, 9024),
    ],
    ids=["large", "a quarter", "none", "by-hand"],
)
def test_staging_leaves_most_of_a_gpus_slots(settings, pool, slots):
    config = VeriCacheConfig(**settings)
    assert resolve_staging(config, 16384, None, pool) == slots


def test_staging_needs_a_context():
    with pytest.raises(ConfigError, match="context length"):
        resolve_staging(VeriCacheConfig(), 0)


@given(
    keep=st.floats(0.001, 1),
    verifies=st.integers(1, 64),
    context=st.integers(1, 1 << 20),
)
def test_staging_is_bounded_and_holds_what_it_says(keep, verifies, context):
    config = VeriCacheConfig(keep=keep, max_verifies=verifies)
    slots = resolve_staging(config, context)
    assert slots % 64 == 0
    assert slots <= 65536
    kept = math.floor(keep * context)
    assert slots >= min(65536, verifies * (context - kept))
