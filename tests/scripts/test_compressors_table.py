"""The table of compressors: its arithmetic by hand, its page, and one line served."""

import json
import re
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

import bench_compressors
from compressors_table import markdown, measure
from compressors_table.lines import DEFAULT, SIMULATED, Line, extent, lines
from lossless.runs import faulty
from lossless.warm import run

ROOT = Path(__file__).parents[2]
CALLS = ({"ids": [1, 2, 3], "finish_reason": {"type": "stop"}, "text": "a"},) * 4


def note(request, length, accepted, rounds, **more):
    """What the plugin would write down of one request of 100 prompt tokens."""
    parts = {"offered": 100, "kept": 50, "coded": 40, "slots": 20}
    return {
        "request": request,
        "length": length,
        "alone": False,
        "prompt": 100,
        "kv_bytes": 1000,
        "rounds": rounds,
        "drafted": rounds * length,
        "accepted": accepted,
        "staged_bytes": 600 * rounds,
        "compress_seconds": 0.02,
        "parts": parts,
        **more,
    }


def row(compressor="snapkv", keep=0.25, wrong=()):
    """What ``serve_line`` would return for four requests, of figures made up."""
    line = Line(compressor, keep)
    notes = [
        note(request, length, 40, 4)
        for length in measure.LENGTHS
        for request in range(4)
    ]
    return {
        "name": line.name,
        "compressor": line.compressor,
        "label": line.label,
        "keep": keep,
        "seconds": [1.0] * 5,
        **measure.sizes(line, notes),
        **measure.rounds(notes, short=2),
        "exact": [4, 4, 3, 4],
        "exact_alone": 1,
        "wrong": list(wrong),
        "commit": "abc",
    }


def report(*rows):
    return {
        "provenance": {
            "argv": ["--out", "results.json"],
            "commit": "abc",
            "date": "2026-01-02T03:04:05+00:00",
            "hardware": {"cpu": "a cpu", "omp_threads": "1"},
            "versions": {"sglang": "1", "torch": "2"},
        },
        "options": {"context": 4000, "each": 2, "seed": 0},
        "requests": 4,
        "prompt_tokens": [1000, 2000, 3500, 4000],
        "full_kv": {"exact": 4},
        "lines": list(rows),
    }


def cells(page):
    """The cells of every line of every table."""
    table = [line for line in page.splitlines() if line.startswith("|")]
    return [line[2:-2].split(" | ") for line in table]


def test_selectors_have_a_line_per_kept_share_and_codecs_one():
    found = lines(["snapkv", "kivi:bits=4", "snapkv+kivi:bits=4"], [0.25, 0.125])
    assert [(line.compressor, line.keep) for line in found] == [
        ("snapkv", 0.25),
        ("snapkv", 0.125),
        ("kivi:bits=4", None),
        ("snapkv+kivi:bits=4", 0.25),
        ("snapkv+kivi:bits=4", 0.125),
    ]


def test_every_default_line_can_be_made_and_is_told_apart(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = lines(DEFAULT, [0.25, 0.125])
    assert len({line.name for line in found}) == len(found) == 36
    assert len({(line.label, line.keep) for line in found}) == len(found)
    assert not any("/" in line.label for line in found)


@pytest.mark.parametrize(
    ("compressor", "bits", "transfer"),
    [
        # 50 of 100 tokens kept, none packed: 16 bits of each.
        ("snapkv", 16 * 50 / 100, 50 / 100),
        # 40 packed to 4 bits and, per 32 numbers, a scale and a zero of 16; 10 exact.
        ("snapkv+kivi:bits=4", ((4 + 32 / 32) * 40 + 16 * 10) / 100, 90 / 100),
        # Sign, 3 and 1 bits and 8 for a block of 64; 6 of 16 bits come back.
        (
            "snapkv+split-planes:exponent_bits=3,mantissa_bits=1",
            ((5 + 8 / 64) * 40 + 16 * 10) / 100,
            (50 + 40 * 6 / 16) / 100,
        ),
    ],
)
def test_calculated_sizes_are_those_by_hand(compressor, bits, transfer):
    parts = {"offered": 100, "kept": 50, "coded": 0 if bits == 8 else 40}
    line, packed = Line(compressor, 0.5), extent(2, 64)
    assert line.device_bits(parts, packed) == pytest.approx(bits)
    assert line.transfer_bfloat16(parts, packed) == pytest.approx(transfer)


def test_measured_sizes_are_those_by_hand():
    notes = [
        note(0, 8, 10, 2, prompt=300, kv_bytes=3000, compress_seconds=0.03),
        note(1, 8, 10, 3),
    ]
    found = measure.sizes(Line("snapkv", 0.5), notes)
    assert found["kept_share"] == pytest.approx(0.5)
    assert found["device_share"] == pytest.approx(0.2)
    # 5 rounds of 600 bytes; 2 rounds over 3,000 bytes of KV and 3 over 1,000.
    assert found["transfer"] == pytest.approx(3000 / 9000)
    # 50 ms for 400 tokens.
    assert found["compress_ms_per_1k"] == pytest.approx(125.0)


def test_rounds_are_summed_by_length_without_those_served_alone():
    notes = [
        note(0, 8, 15, 2),
        note(1, 8, 3, 3),
        note(1, 64, 40, 1),
        note(1, 64, 9, 9, alone=True),
    ]
    found = measure.rounds(notes, short=1)["lengths"]
    assert list(found) == ["8", "16", "32", "64"]
    # 17 tokens need 2 rounds of 9 at least, 6 tokens need 1.
    assert found["8"]["all"] == {
        "rounds": 5,
        "drafted": 40,
        "accepted": 18,
        "staged_bytes": 3000,
        "fewest": 3,
    }
    assert found["8"]["long"]["accepted"] == 3
    assert found["64"]["all"]["accepted"] == 40
    assert found["16"]["all"]["rounds"] == 0


def test_the_page_has_every_row_and_whole_tables():
    planes = "split-planes:exponent_bits=3,mantissa_bits=1"
    late = {**row(planes, None), "commit": "def"}
    page = markdown.page(report(row(wrong=[{}, {}]), late))
    assert "commit abc, def, 2026-01-02" in page
    table = cells(page)
    main = [line for line in table if len(line) == len(markdown.HEADS)]
    served, alone = main[2:]
    assert served[0] == "`snapkv`"
    assert served[6:8] == ["10.0 / 10.0 / 10.0 / 10.0", "0.333"]
    assert served[-3:] == ["1 of 4", "3 of 4", "2"]
    assert (alone[0], alone[1], alone[-1]) == (f"`{planes}`", "", "0")
    beside = [line for line in table if len(line) == 4]
    # 44 tokens are 3, 2 and 1 rounds of up to 16, 32 and 64 drafts.
    most, simulated = "13.7 / 21.0 / 43.0", "15.2 / 23.3 / 46.7"
    assert beside[-1] == [f"`{planes}`", "10.0 / 10.0 / 10.0", most, simulated]
    assert "7.8 to 7.8 / 13.7 to 13.7 / 21.0 to 21.0 / 43.0 to 43.0" in page
    assert len(main) + len(beside) == len(table)
    assert max(map(len, re.findall(r"^[^|`].*$", page, re.M))) < 250


def test_lines_of_the_simulation_are_lines_of_the_table():
    assert set(SIMULATED) <= set(DEFAULT)


def test_a_run_goes_on_where_it_was_ended(tmp_path, monkeypatch, capsys):
    out, served = tmp_path / "results.json", []

    def serve_line(run, line, asked, context, full):
        served.append(line.name)
        if line.compressor == "random" and "broken" not in served:
            served.append("broken")
            raise KeyboardInterrupt
        wrong = [{"wave": 0}] if line.compressor == "random" else []
        return row(line.compressor, line.keep, wrong)

    class NoEngines:
        def __init__(self, log):
            self.run = None

        def close(self):
            pass

    monkeypatch.setattr(bench_compressors, "WarmEngines", NoEngines)
    monkeypatch.setattr(bench_compressors, "serve_full", lambda *_: {"exact": 4})
    monkeypatch.setattr(bench_compressors, "serve_line", serve_line)
    argv = ["bench", "--lines", "snapkv", "random", "--keeps", "0.25", "--each", "2"]
    argv += ["--context", "1200", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(KeyboardInterrupt):
        bench_compressors.main()
    assert len(json.loads(out.read_text())["lines"]) == 1
    assert bench_compressors.main() == 1, "a wrong token must not pass"
    names = ["snapkv, keep 0.25", "random, keep 0.25"]
    assert served == [names[0], names[1], "broken", names[1]]
    assert [line["name"] for line in json.loads(out.read_text())["lines"]] == names
    monkeypatch.setattr(sys, "argv", [*argv, "--lines", "random"])
    assert bench_compressors.main() == 1
    assert len(served) == 4, "nothing was to be measured"
    kept = [line["name"] for line in json.loads(out.read_text())["lines"]]
    assert kept == names[::-1], "lines that were not asked for stay"
    assert "`random`" in out.with_suffix(".md").read_text()
    assert "1 wrong" in capsys.readouterr().out


def test_a_file_of_other_prompts_is_not_gone_on_with(tmp_path):
    out = tmp_path / "results.json"
    out.write_text(json.dumps(report()))
    options = Namespace(out=out, context=4000, each=2, seed=1)
    with pytest.raises(SystemExit, match="--seed 0, not 1"):
        bench_compressors.known(options)


@pytest.mark.server
def test_a_line_is_served_verified_and_alone(monkeypatch):
    """A method that forgets most: wrong on its own, as full KV under VeriCache."""
    monkeypatch.setattr(measure, "LENGTHS", (8, 32))
    asked, line = measure.ask(1200, each=2, seed=3), Line("keynorm", 0.125)
    full = measure.serve_full(run, asked, 1200)
    assert len({tuple(answer["ids"]) for answer in full["answers"]}) == 4
    jobs = []

    def watched(system, model, waves):
        jobs.append((system, model, waves, run(system, model, waves)))
        return jobs[-1][-1]

    found = measure.serve_line(watched, line, asked, 1200, full)
    assert found["wrong"] == []
    assert found["exact"] == [full["exact"]] * 2
    assert found["exact_alone"] < full["exact"]
    # Two segments travel without their eighth; what is behind them stays.
    assert 2 * 512 * 0.875 / 1567 < found["transfer"] < 0.885
    for length, sums in found["lengths"].items():
        assert 4 < sums["all"]["rounds"] <= sums["all"]["accepted"], length
        # A server of its own mind drafts a few tokens of a method this bad.
        mean = sums["all"]["drafted"] / sums["all"]["rounds"]
        assert int(length) / 3 < mean <= int(length)

    # The same as what the tests' own fault answers, in a server of its own.
    system, model, _, report = jobs[0]
    environment = faulty("draft_part_alone", system.environment["PYTHONPATH"])
    verified = [asked.wave(measure.LENGTHS[-1])]
    broken = run(replace(system, environment=environment), model, verified)
    alone = report["waves"][-1]
    assert [a["ids"] for a in broken["waves"][0]] == [a["ids"] for a in alone]
