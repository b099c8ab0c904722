"""Flags from the schema, and the README table."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from vericache_sglang.config import (
    VeriCacheConfig,
    add_flags,
    flag,
    given_values,
    options,
    settings_table,
)
from vericache_sglang.config.cli import TABLE_BEGIN, TABLE_END
from vericache_sglang.errors import ConfigError

ROOT = Path(__file__).parents[2]


def read(*argv):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return given_values(parser.parse_args(argv))


def test_flags_not_given_are_absent():
    assert read() == {}


def test_values_get_the_types_of_their_fields():
    given = read("--vericache-keep", "1", "--vericache-draft-length", "8")
    assert given == {"keep": 1.0, "draft_length": 8}
    assert isinstance(given["keep"], float)


def test_every_field_has_a_flag():
    defaults = VeriCacheConfig()
    argv = [
        part
        for name in options()
        for part in (flag(name), str(getattr(defaults, name)))
    ]
    assert list(read(*argv)) == list(options())
    assert all(hasattr(defaults, name) for name in read(*argv))


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
def test_text_that_is_no_value_names_the_flag(name, text):
    with pytest.raises(ConfigError, match=flag(name)):
        read(flag(name), text)


def test_readme_table_is_current():
    readme = (ROOT / "README.md").read_text()
    assert TABLE_BEGIN in readme, "README.md lacks the settings table"
    table = readme[readme.index(TABLE_BEGIN) : readme.index(TABLE_END)] + TABLE_END
    assert table == settings_table(), (
        "paste what `python -m vericache_sglang.config` prints"
    )


def test_table_is_printed_by_the_module():
    printed = subprocess.run(
        [sys.executable, "-m", "vericache_sglang.config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip() == settings_table()
