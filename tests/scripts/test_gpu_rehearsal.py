"""The GPU command's first part, rehearsed with real servers on the CPU."""

import json

import pytest

from gpu import run
from gpu.results import REHEARSAL

pytestmark = [pytest.mark.server, pytest.mark.extended]


def test_boot_is_rehearsed_and_its_table_says_all_of_it(tmp_path, capsys):
    words = ["boot", "--device", "cpu", "--out", str(tmp_path / "out")]
    words += ["--site", str(tmp_path / "site"), "--minutes", "30"]
    status = run.main(words)
    page = capsys.readouterr().out
    assert status == 0, page
    assert REHEARSAL in page
    assert "# boot: 3 of 3 checks passed" in page
    found = json.loads((tmp_path / "out" / "boot.json").read_text())
    rows = {name: one["figures"]["rows"] for name, one in found.items()}
    asked = [(name, row["asked"]) for name in rows for row in rows[name]]
    assert asked == [
        ("plain", "short prompt"),
        ("plain", "long prompt"),
        ("default", "short prompt"),
        ("default", "long prompt"),
        ("default", "prefix hit"),
        ("host", "short prompt"),
    ]
    drafting = [row for name in rows if name != "plain" for row in rows[name]]
    assert {row["as plain"] for row in drafting} == {"yes"}
    assert int(rows["host"][0]["staged_bytes"]) > 0
    assert int(rows["default"][1]["prompt"]) > 2048  # two chunks and more
    for one in found.values():
        assert one["attention"] == "vericache"
        assert one["origin"]["argv"] == words
        assert {"commit", "versions", "hardware", "stack"} <= one["origin"].keys()
