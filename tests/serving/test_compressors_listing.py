"""The listing shows every method there is, from numbers worked out by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vericache_sglang import compressors
from vericache_sglang.compression.base import SELECTORS
from vericache_sglang.compression.catalog import CODECS, known_names

THIRD_PARTY = Path(__file__).parents[1] / "compressors"


@pytest.fixture
def listed():
    return {row.name: row for row in compressors.rows()}


def test_every_registered_name_is_listed_with_what_it_says_of_itself(listed, capsys):
    assert set(listed) == set(SELECTORS.names()) | set(CODECS) == set(known_names())
    compressors.main([])
    page = capsys.readouterr().out
    (table,) = [
        block.splitlines() for block in page.split("\n\n") if block.startswith("name  ")
    ]
    for name, row in listed.items():
        owner = SELECTORS[name] if name in SELECTORS else CODECS[name]
        assert row.paper == owner.about.paper != ""
        assert (row.kind, row.mode) == (owner.about.kind, owner.about.mode)
        assert row.scenarios == owner.about.scenarios
        assert row.licence == owner.about.licence
        assert row.error == row.origin == ""
        (line,) = [each for each in table if each.startswith(name + " ")]
        assert f" {row.kind} " in line
        assert f"\n{name}\n  paper: {row.paper}\n" in page
    assert {name for name, row in listed.items() if row.kind == "drop"} == set(
        SELECTORS.names()
    )


def test_every_codec_says_what_its_reference_allows(listed):
    assert listed["kivi"].licence.startswith("MIT")
    for name in ("kvquant", "rotatekv"):
        assert "no" in listed[name].licence.split()[0]
        assert listed[name].licence.endswith("no code shared")
    assert all(listed[name].licence for name in CODECS)


def test_sizes_are_those_of_the_formats(listed):
    tokens, dim, heads = 4096, 128, 8
    row = heads * dim
    kivi_keys = 2 + 2 * 16 / 32  # code, step and minimum of 32; no tail: 4096 % 32 == 0
    kivi_values = ((tokens - 32) * kivi_keys + 32 * 16) / tokens
    places = 13  # 1.25 % of 1024 columns, rounded up
    kvquant = (
        4 + places * (16 + 16) / row + 16 / row
    )  # values: offset and reach, 2 x 16
    wanted = {
        "kivi": ((kivi_keys + kivi_values) / 2, 1),
        "kvquant": (kvquant, 1),
        "rotatekv": (2 + (16 + 16) / 128, 1),
        "split-planes": (8 + (8 / 64 + 8 / 128) / 2, 4 / 16),
        "turboquant": (4 + 16 / 128, 1),
    }
    assert set(wanted) == set(CODECS)
    for name, (bits, transfer) in wanted.items():
        assert listed[name].draft_bits == pytest.approx(bits)
        assert listed[name].transfer == transfer
    for name in SELECTORS.names():
        assert (listed[name].draft_bits, listed[name].transfer) == (16, None)


def test_needs_and_options_are_spelled_out(listed):
    assert listed["snapkv"].needs == ("keys", "last 64 queries")
    assert listed["snapkv"].options == ("pooling=5",)
    assert listed["random"].needs == ()
    assert "nothing" in listed["random"].cells()
    assert listed["kvzip"].needs == ("further forwards",)
    assert "plus=false" in listed["kvzip"].options
    assert listed["split-planes"].needs == ("multiples of 64 tokens",)
    assert listed["rotatekv"].needs[0] == "a file of rotatekv-tables"
    assert listed["rotatekv"].options[:2] == ("tables=(required)", "bits=2")


def test_third_parties_are_listed_and_one_that_fails_does_not_hide_the_rest(
    tmp_path, monkeypatch
):
    info = tmp_path / "broken-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vericache_sglang.compressors]\n"
        "gone = no_such_module:Selector\n"
        "odd = fractions:Fraction\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(THIRD_PARTY))
    listed = {row.name: row for row in compressors.rows()}
    assert listed["test-random"].origin == "vericache_test_compressors:RandomTokens"
    assert listed["test-random"].error == ""
    assert "no_such_module" in listed["gone"].error
    assert "Fraction, not a Selector" in listed["odd"].error
    assert "cannot be imported: ModuleNotFoundError" in listed["gone"].details()
    assert listed["gone"].cells()[4:6] == ("?", "?")
    assert listed["keynorm"].draft_bits == 16


def test_the_command_runs_without_sglang_and_prints_json():
    code = (
        "import sys; sys.modules.update(sglang=None, transformers=None)\n"
        "from vericache_sglang.compressors import main\n"
        "sys.exit(main(['--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    shown = json.loads(done.stdout)
    assert shown["shape"]["key_dim"] == 128
    assert shown["shape"]["dtype"] == "bfloat16"
    names = [method["name"] for method in shown["methods"]]
    assert {*SELECTORS.names(), *CODECS} <= set(names)
    (planes,) = [each for each in shown["methods"] if each["name"] == "split-planes"]
    assert planes["transfer"] == 0.25
