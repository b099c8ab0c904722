"""Parts of the GPU command merged into one file, and its tables."""

import json

import pytest

from gpu import collect, journal
from gpu.pages import markdown_table, text_table
from gpu.part import REHEARSAL
from gpu.parts import PARTS

STAMP = {
    "source": "aaaa",
    "device": "CPU x",
    "commit": "abc1234",
    "argv": ["--parts", "device"],
    "date": "2026-11-21T12:00:00+00:00",
    "label": "",
    "versions": {"torch": "2"},
}


def part_file(out, name, **changes):
    found = {
        "part": name,
        "status": "ok",
        "label": "",
        "stamp": STAMP,
        "steps": {"a": {"seconds": 1.0}},
        "seconds": 12.3,
        "done": "1 of 1 steps",
        "error": "",
        "headline": "fine",
        "checks": [{"what": "x|y", "wanted": "1", "got": "2", "passed": False}],
        "tables": [{"title": "T", "columns": ["a", "b"], "rows": [["1", "2"]]}],
    }
    journal.write(journal.file_of(out, name), found | changes)


def test_merged_files_have_every_part_with_its_origin(tmp_path, capsys):
    for name in PARTS:
        part_file(tmp_path, name)
    words = ["--out", str(tmp_path), "--results", str(tmp_path / "results")]
    assert collect.main(words) == 0
    base = tmp_path / "results" / "cpu-x-2026-11-21"
    report = json.loads(base.with_suffix(".json").read_text())
    assert [*report["parts"]] == [*PARTS]
    page = base.with_suffix(".md").read_text()
    assert page in capsys.readouterr().out
    assert "| x\\|y | 1 | 2 | NO |" in page
    assert "commit abc1234" in page
    assert "REHEARSAL" not in page


def test_a_missing_or_failed_part_is_told_by_the_status(tmp_path):
    for name in PARTS:
        part_file(tmp_path, name)
    words = ["--out", str(tmp_path), "--results", str(tmp_path / "results")]
    part_file(tmp_path, "boot", status="failed", error="no | server")
    assert collect.main(words) == 1
    journal.file_of(tmp_path, "boot").unlink()
    assert collect.main(words) == 1


def test_labels_are_on_every_merged_page_and_in_the_name(tmp_path):
    part_file(tmp_path, "device", label=REHEARSAL, stamp=STAMP | {"label": REHEARSAL})
    told = f"{REHEARSAL}. SIMULATED ACCEPTANCE: p"
    part_file(tmp_path, "throughput", label=told, stamp=STAMP | {"label": REHEARSAL})
    collect.main(["--out", str(tmp_path), "--results", str(tmp_path / "results")])
    page = (tmp_path / "results" / "REHEARSAL-cpu-x-2026-11-21.md").read_text()
    assert page.count(REHEARSAL) >= 3
    assert f"## throughput\n\n**{told}**" in page


def test_results_of_two_devices_are_not_merged(tmp_path):
    part_file(tmp_path, "device")
    part_file(tmp_path, "boot", stamp=STAMP | {"device": "CPU y"})
    with pytest.raises(SystemExit, match="several devices: CPU x, CPU y"):
        collect.merge(tmp_path)
    with pytest.raises(SystemExit, match="has no results"):
        collect.merge(tmp_path / "empty")


def test_parts_of_different_code_are_told(tmp_path):
    part_file(tmp_path, "device")
    part_file(tmp_path, "boot", stamp=STAMP | {"source": "bbbb", "commit": "def"})
    report = collect.merge(tmp_path)
    assert report["commits"] == ["abc1234", "def"]
    collect.main(["--out", str(tmp_path), "--results", str(tmp_path)])
    assert "different code" in (tmp_path / "cpu-x-2026-11-21.md").read_text()


def test_tables_line_up():
    assert text_table(("a", "bb"), [("ccc", "d")]) == "a    bb\nccc  d"
    shown = markdown_table(("a", "b"), [("1\n2", "x|y")])
    assert shown == "| a | b |\n|---|---|\n| 1 2 | x\\|y |"
