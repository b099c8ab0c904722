"""JSON, page and picture: the same figures, and the label on all of them."""

import json
import re
from xml.etree import ElementTree

import pytest

from vericache_sglang.evaluation.picture import draw, draw_sweep, figure_of
from vericache_sglang.evaluation.report import page


def rows(text, title):
    """Return the table under a heading, by the first cell, as lists of cells."""
    part = text.split(f"## {title}")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells[1:]}


def test_ratios_are_to_plain_in_the_same_round(build_report):
    systems = build_report()["systems"]
    assert systems["plain"]["ratios"] == [1.0, 1.0]
    assert systems["vericache"]["ratios"] == [2.0, 1.5]
    assert systems["vericache"]["ratio"] == {"median": 1.75, "min": 1.5, "max": 2.0}
    assert systems["plain"]["tokens_per_s"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert systems["vericache"]["mismatches"] == 0
    assert systems["lossy"]["mismatches"] == 2  # one request of each round


def test_a_system_gets_the_clients_it_is_fastest_with(build_report):
    systems = build_report("--concurrency", "2", "4")["systems"]
    assert systems["plain"]["concurrency"] == 4
    assert systems["vericache"]["concurrency"] == 2  # not tuned: the first


def test_the_page_has_the_numbers_of_the_json(build_report):
    shared = ("--engine=--page-size 4", "--vericache=--vericache-keep 0.5")
    report = json.loads(json.dumps(build_report(*shared)))
    text = page(report)
    assert "every server: `--page-size 4`" in text
    assert "drafts: `--vericache-keep 0.5`" in text
    speed = rows(text, "Speed")
    drafting = rows(text, "Drafting")
    for name, row in report["systems"].items():
        rate, ratio = row["tokens_per_s"], row["ratio"]
        first, wait = row["ttft_s"], row["itl_s"]
        assert speed[name][:5] == [
            str(row["concurrency"]),
            f"{rate['median']:.1f} ({rate['min']:.1f} to {rate['max']:.1f})",
            f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
            f"{first['p50']:.2f}, {first['p90']:.2f}, {first['p99']:.2f}",
            f"{wait['p50'] * 1e3:.1f}, {wait['p90'] * 1e3:.1f}, "
            f"{wait['p99'] * 1e3:.1f}",
        ]
        assert drafting[name][-2:] == [f"{row['mismatches']} of 4", "0"]
    assert speed["plain"][1] == "2.5 (2.0 to 3.0)"
    assert drafting["vericache"] == [
        "5.70",
        "-",
        "-",
        "833",
        "18.8",
        "50.0",
        "0 of 4",
        "0",
    ]
    assert rows(text, "Distance")["lossy"] == [
        *("0.1234", "9.87", "4.56", "75.0", "4", "20")
    ]
    assert list(rows(text, "Open loop")) == ["vericache"]
    assert report["provenance"]["command"] in text
    assert "load average at the start 0.5" in text
    assert all(name in text for name in ("abc1234", "a CPU, 2 cores", "python 3.11"))


def test_every_figure_of_the_page_is_defined(build_report):
    text = page(build_report())
    defined = set(re.findall(r"^- `(\w+)`: ", text.split("## What")[1], re.M))
    assert {"tokens_per_s", "ttft_s", "itl_s", "latency_s", "ratio", "kl"} <= defined


def test_nothing_is_labelled_that_was_measured(build_report, tmp_path):
    report = build_report()
    draw(report, tmp_path / "b.png")
    assert report["label"] == ""
    assert "SIMULATED" not in page(report)
    assert b"SIMULATED" not in (tmp_path / "b.png").read_bytes()


def test_simulated_acceptance_is_written_on_everything(build_report, tmp_path):
    report = build_report("--simulated-acceptance", "0.9")
    assert report["label"].startswith("SIMULATED ACCEPTANCE: ")
    assert "p = 0.9" in report["label"]
    text = page(report)
    tables = re.findall(r"^## (.*)\n\n\|", text, re.M)
    assert len(tables) >= 4
    assert all(title.endswith("(SIMULATED ACCEPTANCE)") for title in tables)
    assert text.index("SIMULATED ACCEPTANCE") < text.index("python -m")
    assert figure_of(report).get_suptitle().startswith("SIMULATED ACCEPTANCE")
    draw(report, tmp_path / "b.png")
    assert b"SIMULATED ACCEPTANCE" in (tmp_path / "b.png").read_bytes()
    # Tokens are by dice, so there is nothing to compare.
    assert {row["mismatches"] for row in report["systems"].values()} == {None}


def heights(axes, count):
    """Return the heights of the first bars of a panel."""
    return [bar.get_height() for bar in axes.patches[:count]]


def test_the_picture_shows_the_figures(build_report):
    report = build_report("--concurrency", "2", "4")
    systems = report["systems"]
    speed, first, waits, tuning, load, _ = figure_of(report).axes
    wanted = [row["tokens_per_s"]["median"] for row in systems.values()]
    assert heights(speed, 3) == wanted
    ratios = [f"{row['ratio']['median']:.2f}x" for row in systems.values()]
    assert [text.get_text() for text in speed.texts] == ratios
    assert speed.get_xticklabels()[0].get_text() == "plain\n4 clients"
    for axes, key, scale in ((first, "ttft_s", 1), (waits, "itl_s", 1e3)):
        shares = ("p50", "p90", "p99")
        wanted = [row[key][p] * scale for row in systems.values() for p in shares]
        assert heights(axes, 9) == pytest.approx(wanted)
    (tuned, *_) = tuning.lines
    assert tuned.get_xydata().tolist() == [[2, 2.5], [4, 2.9]]
    median, last = load.lines[-2:] if len(load.lines) == 2 else load.lines[2:4]
    for line, share in ((median, "p50"), (last, "p99")):
        found = systems["vericache"]["open_loop"]
        points = [[each["rate"], each["latency_s"][share]] for each in found]
        assert line.get_xydata().tolist() == points
        assert line.get_label() == f"vericache {share}"


def test_a_system_that_failed_is_told_and_drawn_without(build_report):
    report = build_report()
    row = report["systems"]["lossy"]
    row |= {
        "skipped": "did not start: no such kernel",
        "errors": ["HTTP 500"],
        "rounds": [],
        "divergence": None,
        **dict.fromkeys(("tokens_per_s", "ratio", "ttft_s", "itl_s", "latency_s")),
    }
    text = page(report)
    assert "`lossy` was left out: did not start: no such kernel" in text
    assert "- `lossy`: HTTP 500" in text
    speed, *_ = figure_of(report).axes
    assert [label.get_text() for label in speed.get_xticklabels()] == [
        *("plain\n4 clients", "vericache\n4 clients"),
    ]


def test_a_sweep_is_drawn_with_a_line_for_every_number_of_requests(tmp_path):
    rows = [
        {"context": context, "requests": n, "ratios": [0.9 * n, 1.1 * n, n]}
        for context in (200, 6000)
        for n in (1, 8)
    ]
    drawn = tmp_path / "speed.svg"
    draw_sweep(rows, drawn)
    text = drawn.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for label in ("1 at once", "8 at once", "200", "6,000"):
        assert f"<!-- {label} -->" in text, label
    again = tmp_path / "again.svg"
    draw_sweep(rows[::-1], again)
    assert again.read_text() == text, "the same figures make the same file"
