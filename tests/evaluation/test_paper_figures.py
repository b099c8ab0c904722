"""The paper's figures by name: every target at toy size, its table and its plot."""

import json
from contextlib import contextmanager
from xml.etree import ElementTree

import pytest
from live_server import fork

from vericache_sglang.evaluation.benchmark import DEMO, DEMO_LONG, Results
from vericache_sglang.evaluation.benchmarks import figure_systems, pipeline1
from vericache_sglang.evaluation.benchmarks.divergence import FULL
from vericache_sglang.evaluation.benchmarks.figure_systems import CALLS, GROUPS, RATES
from vericache_sglang.evaluation.benchmarks.paper_figures import (
    FIGURES,
    LEFT_OUT,
    TARGETS,
)
from vericache_sglang.evaluation.benchmarks.pipeline1 import AGAIN
from vericache_sglang.evaluation.command import main
from vericache_sglang.evaluation.server import Server

PURE = ("fig8-left", "fig11-right")
"""Without a simulated column."""

PLANNED = [name for name, target in TARGETS.items() if target.columns]
MEASURED = [
    name
    for name, target in TARGETS.items()
    if target.measured and not any(each.startswith("SIM") for each in target.columns)
]
"""With measured columns, and no simulated ones, which take long."""
READ = {
    row
    for target in TARGETS.values()
    for reading in target.measured.values()
    for row in reading.rows
}


def figures(out, *names, flag="--figures", more=("--planned-only",)):
    toy = ("--requests", "8", "--tokens", "32", "--out", str(out))
    return main([flag, *names, *toy, *more])


def extended(name):
    return name if name in PURE else pytest.param(name, marks=pytest.mark.extended)


@pytest.mark.parametrize("name", map(extended, PLANNED))
def test_a_figure_has_table_and_plot(tmp_path, name):
    assert figures(tmp_path / "f.json", name, flag="--figure") == 0
    (row,) = json.loads((tmp_path / "f.json").read_text())["rows"]
    target = TARGETS[name]
    for column, values in row["columns"].items():
        assert len(values) == len(target.points)
        found = [value for value in values if value is not None]
        assert found
        assert all(value > 0 for value in found)
        assert column.split(",")[0] in ("paper", "planned", "SIMULATED")
        modelled = [point for point in target.points if point != "measured here"]
        assert column.startswith("paper") or len(found) == len(modelled)
    text = (tmp_path / "f.md").read_text()
    assert f"## {name}" in text
    assert target.title in text
    assert "Nothing here is a measurement" in text
    assert all(left in text for left in LEFT_OUT)
    drawn = ElementTree.parse(tmp_path / "f.svg")
    assert drawn.getroot().tag.endswith("svg")


def test_every_figure_of_the_paper_is_a_target_or_named_as_left_out():
    known = " ".join([*TARGETS, *LEFT_OUT])
    assert all(f"fig{number}" in known for number in range(1, 18))


def test_every_row_that_a_figure_reads_is_a_system_of_its_group():
    options = FIGURES._parser("figures").parse_args([])
    made = {
        group.of(name)
        for group in GROUPS
        for name in (
            *(FULL, AGAIN),
            *(
                system.name
                for system in figure_systems._systems(
                    group, figure_systems._given(group, options)
                )
            ),
        )
    }
    assert made >= READ


def made_row(name):
    """Return a row made up, with every figure that readings look for."""
    speed, group = 10.0 + len(name), name.rpartition(", ")[2]
    value = {"value": 1 / len(name), "low": 0.0, "high": 1.0, "n": 2}
    listed = group.endswith("lists")
    scores = ("completion rate", "exact") if listed else ("call accuracy", "utility")
    task = {
        "scores": dict.fromkeys(scores, value),
        **dict.fromkeys(("word_f1", "kl_per_step"), value),
        "steps": [[0.5, 0.25, *[0.0] * 28], [0.5]],
    }
    names = (
        ("long-gen-bench", "gsm8k-long")
        if listed
        else (*("complex-func-bench", "pisanitizer", "lmcache-trace"),)
    )
    middle = dict.fromkeys(("median", "min", "max"), speed)
    rates = [{"rate": rate, "latency_s": {"p50": 1 / rate}} for rate in RATES]
    return {
        "lossy": False,
        "tokens_per_s": middle,
        "ratio": dict.fromkeys(("median", "min", "max"), speed / 20),
        "accepted_per_verify": 4.5,
        "proposals_per_row": 1.5,
        "rounds": [{"counters": {"drafted": 8, "accepted": 6}}],
        "open_loop": rates,
        "tasks": dict.fromkeys(names, task),
        "mismatches": 0,
    }


@pytest.fixture
def no_servers(monkeypatch):
    """Have servers answer with ``made_row``; returns the systems that were asked.

    A system named in ``asked.fatal`` takes the process down.
    """

    class Asked(list):
        fatal = ""

    asked = Asked()

    @contextmanager
    def serves(system, model, start=None):
        yield Server("http://127.0.0.1:9")

    def measured(study, load, server, system, full):
        if system.name == asked.fatal:
            raise SystemExit(143)
        asked.append((system.name, study.options.model))
        return made_row(system.name)

    monkeypatch.setattr(pipeline1, "served", serves)
    monkeypatch.setattr(pipeline1, "answered", measured)
    monkeypatch.setattr(pipeline1, "reference", lambda study, server: {"a": 1})
    monkeypatch.setattr(pipeline1.TaskRequests, "ask", lambda self, server, given: None)
    return asked


SMALL = ("--samples", "1", "--context", "600")


@pytest.mark.extended
def test_measured_columns_are_read_from_the_rows_of_systems(no_servers, tmp_path):
    assert figures(tmp_path / "f.json", *MEASURED, more=SMALL) == 0
    report = json.loads((tmp_path / "f.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    for name in MEASURED:
        for column in TARGETS[name].measured:
            assert any(value is not None for value in rows[name]["columns"][column])
    nats = [0.625] * 4 + [None] * 3  # its sequences have 30 tokens
    assert rows["fig4"]["columns"]["MEASURED, KVzip"] == nats
    assert rows["fig8-left"]["columns"]["MEASURED"][0] == pytest.approx(0.75)
    assert rows["fig12"]["columns"]["MEASURED, EAGLE3"] == [1.0, 0.5, 0.25]
    assert dict(no_servers)["EAGLE3 alone, calls"] == DEMO
    assert dict(no_servers)["VeriCache, lists"] == DEMO_LONG
    assert len({*no_servers}) == len(no_servers), "each once"
    assert "EAGLE3" not in report["left_out"]
    text = (tmp_path / "f.md").read_text()
    assert "no measurement of the paper's models" in " ".join(text.split())
    assert ElementTree.parse(tmp_path / "f.svg").getroot().tag.endswith("svg")


def test_a_model_without_a_head_has_no_eagle3_column(no_servers, tmp_path):
    given = ("--model", str(DEMO_LONG), *SMALL)
    assert figures(tmp_path / "f.json", "fig12", "fig15", more=given) == 0
    report = json.loads((tmp_path / "f.json").read_text())
    assert "demo-model-long" in report["left_out"]["EAGLE3"]
    *_, latency, extras = report["rows"]
    assert latency["columns"]["MEASURED, EAGLE3"] == [None] * 3
    shown = dict(
        zip(extras["points"], extras["columns"][extras["across"]], strict=True)
    )
    assert shown["VeriCache over KVQuant"] is None, "the tables are another model's"
    assert shown["VeriCache over SnapKV"] is not None


def test_a_killed_run_resumes_and_gives_the_same_table(no_servers, tmp_path):
    names = ("fig8-left", "fig9", "fig10-left")
    assert figures(tmp_path / "whole.json", *names, more=SMALL) == 0
    whole, no_servers[:] = [*no_servers], []
    no_servers.fatal = whole[2][0]
    with pytest.raises(SystemExit):
        figures(tmp_path / "cut.json", *names, more=SMALL)
    no_servers.fatal = ""
    assert figures(tmp_path / "cut.json", *names, more=(*SMALL, "--resume")) == 0
    assert no_servers == whole
    tables = [
        [
            line
            for line in (tmp_path / f"{name}.md").read_text().splitlines()
            if line.startswith(("| ", "- "))
        ]
        for name in ("whole", "cut")
    ]
    assert tables[0] == tables[1]


def test_a_system_that_failed_is_measured_again(no_servers, monkeypatch, tmp_path):
    """The figure that lacks it is not kept either."""
    out, row = tmp_path / "f.json", CALLS.of("VeriCache")
    real = pipeline1.answered

    def failing(study, load, server, system, full):
        if system.name == row:
            return {"lossy": False, "error": "no memory"}
        return real(study, load, server, system, full)

    monkeypatch.setattr(pipeline1, "answered", failing)
    assert figures(out, "fig14", more=SMALL) == 1
    assert [r["name"] for r in json.loads(out.read_text())["rows"] if "error" in r] == [
        row,
        "fig14",
    ]
    monkeypatch.setattr(pipeline1, "answered", real)
    assert figures(out, "fig14", more=(*SMALL, "--resume")) == 0
    rows = {each["name"]: each for each in json.loads(out.read_text())["rows"]}
    at = rows["fig14"]["points"].index("VeriCache")
    assert rows["fig14"]["columns"]["MEASURED, KL a step, nats"][at] is not None


@pytest.mark.server
@pytest.mark.extended
def test_a_figure_is_measured_with_servers(tmp_path):
    """EAGLE3 and what it is composed with, forced to propose: every proposal counts."""
    words = (
        *SMALL,
        "--tasks",
        "complex-func-bench",
        "--output",
        "64",
        "--repeats",
        "1",
    )
    options = FIGURES._parser("figures").parse_args([*words, "--min-prompt", "64"])
    results = Results(FIGURES, ["figures"], options, figures={"left_out": {}})
    wanted = [row for r in TARGETS["fig10-left"].measured.values() for row in r.rows]
    figure_systems.measure_rows(wanted, options, results, fork)
    assert results.failures == []
    readings = TARGETS["fig10-left"].measured
    found = {
        name: [each.at(point, results.rows) for point in TARGETS["fig10-left"].points]
        for name, each in readings.items()
    }
    head, alone, both = found["MEASURED, proposals a row"]
    assert alone is None
    assert 0 < head <= figure_systems.CHAIN
    assert both > 0
    assert found["MEASURED, drafts a verification"][0] is None
    assert found["MEASURED, drafts a verification"][1] > 4


def test_planned_values_are_the_papers_equations(tmp_path):
    """By hand: 23 of 30 accepted is the point that fixes the curve."""
    assert figures(tmp_path / "f.json", "fig8-left") == 0
    (row,) = json.loads((tmp_path / "f.json").read_text())["rows"]
    at = row["points"].index(30)
    for model, accepted in (("Llama-70B", 23), ("Qwen-32B", 19)):
        rates = row["columns"][f"planned, {model}"]
        assert rates[at] == pytest.approx(accepted / 30, rel=1e-6)
        assert rates == sorted(rates, reverse=True)


def test_a_run_goes_on_where_it_ended(tmp_path):
    assert figures(tmp_path / "f.json", "fig8-left") == 0
    before = json.loads((tmp_path / "f.json").read_text())["rows"]
    given = ("--planned-only", "--resume")
    assert figures(tmp_path / "f.json", *PURE, more=given) == 0
    after = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [row["name"] for row in after] == list(PURE)
    assert after[0] == before[0]


@pytest.mark.parametrize("name", ["fig99", "fig2"])
def test_an_unknown_figure_is_named_with_the_known_ones(tmp_path, capsys, name):
    assert figures(tmp_path / "f.json", name) == 2
    told = capsys.readouterr().err
    assert f"--figures {name}" in told
    assert "fig13-left-link" in told
