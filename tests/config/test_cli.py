"""Flags from the schema, and the settings page."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from vericache_sglang.config.cli import add_flags, given_values, settings_page
from vericache_sglang.config.files import ENV, load_config
from vericache_sglang.config.schema import VeriCacheConfig, fields, flag
from vericache_sglang.errors import ConfigError

ROOT = Path(__file__).parents[2]


def read(*argv):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return given_values(parser.parse_args(argv))


def test_values_get_the_types_of_their_fields():
    given = read("--vericache-keep", "1", "--vericache-draft-length", "8")
    assert given == {"keep": 1.0, "draft_length": 8}
    assert isinstance(given["keep"], float)
    assert read() == {}


def test_every_field_has_a_flag():
    values = VeriCacheConfig().model_dump()
    argv = [part for name in values for part in (flag(name), str(values[name]))]
    assert read(*argv) == values
    assert list(values) == list(fields())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("compressor", " "),
        ("keep", "half"),
        ("keep", "nan"),
        ("draft_length", "8.5"),
        ("draft_length", "1e3"),
        ("host_gb", "4GB"),
    ],
)
def test_text_that_is_no_value_names_the_flag(monkeypatch, name, text):
    monkeypatch.delenv(ENV, raising=False)
    with pytest.raises(ConfigError, match=f"command line: .*{flag(name)}"):
        load_config(None, read(flag(name), text))


def test_the_former_flag_of_the_consistency_check_is_taken(monkeypatch, caplog):
    monkeypatch.delenv(ENV, raising=False)
    config = load_config(None, read("--vericache-shadow-rate", "0.5"))
    assert config == VeriCacheConfig(consistency_check_rate=0.5)
    assert "--vericache-consistency-check-rate" in caplog.text
    both = read("--vericache-shadow-rate", "1", "--vericache-consistency-check-rate=1")
    with pytest.raises(ConfigError, match="shadow_rate is the former name of"):
        load_config(None, both)


def test_the_settings_page_is_what_the_module_prints():
    printed = subprocess.run(
        [sys.executable, "-m", "vericache_sglang.config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed == settings_page()
    assert (ROOT / "docs" / "settings.md").read_text() == printed, (
        "python -m vericache_sglang.config > docs/settings.md"
    )
    for name in fields():
        assert f"`{flag(name)}`" in printed


def test_settings_are_read_without_torch_and_sglang():
    code = "import sys, vericache_sglang.config.cli as c; c.settings_page();"
    code += "sys.exit(bool({'torch', 'sglang'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
