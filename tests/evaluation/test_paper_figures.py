"""The paper's figures by name: every target at toy size, its table and its plot."""

import json
from xml.etree import ElementTree

import pytest

from vericache_sglang.evaluation.benchmarks.paper_figures import LEFT_OUT, TARGETS
from vericache_sglang.evaluation.command import main

PURE = ("fig8-left",)
"""Without a simulated column."""


def figures(out, *names, flag="--figures"):
    toy = ("--requests", "8", "--tokens", "32", "--out", str(out))
    return main([flag, *names, *toy])


def extended(name):
    return name if name in PURE else pytest.param(name, marks=pytest.mark.extended)


@pytest.mark.parametrize("name", map(extended, TARGETS))
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
        assert column.startswith("paper") or len(found) == len(values)
    text = (tmp_path / "f.md").read_text()
    assert f"## {name}" in text
    assert target.title in text
    assert all(left in text for left in LEFT_OUT)
    drawn = ElementTree.parse(tmp_path / "f.svg")
    assert drawn.getroot().tag.endswith("svg")


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
    both = ("fig8-left", "fig13-right-arrival")
    assert figures(tmp_path / "f.json", *both, "--resume") == 0
    after = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [row["name"] for row in after] == list(both)
    assert after[0] == before[0]


@pytest.mark.parametrize("name", ["fig99", "fig4"])
def test_an_unknown_figure_is_named_with_the_known_ones(tmp_path, capsys, name):
    assert figures(tmp_path / "f.json", name) == 2
    told = capsys.readouterr().err
    assert f"--figures {name}" in told
    assert "fig13-left-link" in told
