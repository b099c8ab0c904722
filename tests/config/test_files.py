"""YAML files, inline JSON and the environment variable."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.config.files import (
    ENV,
    OFF,
    active_config,
    config_from,
    is_disabled,
    load_config,
    publish,
    read_yaml,
    to_yaml,
)
from vericache_sglang.config.schema import VeriCacheConfig, fields
from vericache_sglang.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv(ENV, raising=False)
    active_config.cache_clear()
    yield
    active_config.cache_clear()


@pytest.fixture
def write(tmp_path):
    def save(text):
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return path

    return save


configs = st.builds(
    VeriCacheConfig,
    compressor=st.sampled_from(["keynorm", "snapkv", "recency", "no", "1"]),
    keep=st.floats(0.001, 1),
    draft_length=st.integers(1, 256),
    host_gb=st.floats(0.1, 1e6),
    seed=st.integers(0, 2**63 - 1),
)


@given(config=configs)
def test_yaml_and_json_give_back_what_they_were_given(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("yaml") / "settings.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path, {}) == config
    assert config_from(json.loads(config.model_dump_json()), "x") == config


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_shipped_files_load_and_comment_every_field(path):
    config = load_config(path, {})
    assert list(read_yaml(path)) == list(fields())
    # Below its own first comment a file is exactly what the schema writes.
    assert path.read_text().endswith(f"\n\n{to_yaml(config)}")


def test_there_are_shipped_files():
    names = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert {"demo.yaml", "long_context.yaml"} <= names


def test_off_and_on_are_names_and_need_no_quotes(write):
    path = write("trace: off\nlive_page: off\nstore_shared_folder: on\n")
    wanted = VeriCacheConfig(trace="off", live_page="off", store_shared_folder="on")
    assert load_config(path, {}) == wanted


def test_absent_fields_take_their_defaults(write):
    assert load_config(write("keep: 0.5\n"), {}) == VeriCacheConfig(keep=0.5)
    assert load_config(write(""), {}) == VeriCacheConfig()


def test_flags_win_over_the_environment(monkeypatch):
    monkeypatch.setenv(ENV, '{"keep": 0.5, "seed": 7}')
    assert load_config(None, {"seed": 8}) == VeriCacheConfig(keep=0.5, seed=8)


def test_a_file_replaces_the_environment(monkeypatch, write):
    monkeypatch.setenv(ENV, '{"keep": 0.5, "seed": 7}')
    assert load_config(write("seed: 9"), {}) == VeriCacheConfig(seed=9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keeep: 0.5", "unknown field 'keeep'; did you mean keep?"),
        ("zzz: 0.5", "unknown field 'zzz'; known: compressor, keep"),
        ("shadow_rates: 1", "unknown field 'shadow_rates'"),
        ("shadow_rate: 2", r"consistency_check_rate .* <= 1 .*, got 2"),
        ("keep: 2", r"keep \(--vericache-keep\) must be a number > 0 and <= 1"),
        ("draft_length: yes", "draft_length .* got True"),
        ("draft_length: '16'", "draft_length .* got '16'"),
        ("keep:", "keep .* got nothing"),
        ("keep: [0.5]", "keep .* got \\[0.5\\]"),
        ("- keep", "expected lines `field: value`, got list"),
        ("0.5", "expected lines `field: value`, got float"),
        ("keep: 0.5\nkeep: 0.25", "written twice: keep"),
        ("1: 2", "unknown field '1'"),
        ("keep: 0.5\n bad: [", "not valid YAML"),
        ("keep: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path, {"keep": 0.5})
    assert str(path) in str(caught.value)


def test_a_missing_file_names_the_flag(tmp_path):
    with pytest.raises(ConfigError, match="--vericache-config"):
        load_config(tmp_path / "absent.yaml", {})


def test_environment_may_name_a_file(monkeypatch, write):
    monkeypatch.setenv(ENV, str(write("draft_length: 9")))
    assert active_config() == VeriCacheConfig(draft_length=9)


@pytest.mark.parametrize(("value", "off"), [(None, False), ("", False), (OFF, True)])
def test_environment_may_be_unset_or_off(monkeypatch, value, off):
    if value is not None:
        monkeypatch.setenv(ENV, value)
    assert active_config() is None
    assert is_disabled() is off


@pytest.mark.parametrize(
    "value", ['{"keep": 2}', '{"keep": }', '{"horizon": 3}', "nowhere.yaml", "{}x"]
)
def test_a_bad_environment_is_named(monkeypatch, value):
    monkeypatch.setenv(ENV, value)
    with pytest.raises(ConfigError, match=f"{ENV}|nowhere.yaml"):
        active_config()


def test_publishing_replaces_what_was_read_before(monkeypatch):
    monkeypatch.setenv(ENV, '{"seed": 1}')
    assert active_config() == VeriCacheConfig(seed=1)
    publish(VeriCacheConfig(seed=2))
    assert active_config() == VeriCacheConfig(seed=2)
    publish(None)
    assert active_config() is None
    assert is_disabled()
