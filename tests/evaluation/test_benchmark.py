"""The table of benchmarks: options, rows that are kept, failures that are told."""

import json
import re
import shlex
from pathlib import Path

import pytest

from vericache_sglang.evaluation.benchmark import REPOSITORY, Benchmark
from vericache_sglang.evaluation.command import BENCHMARKS, main

PROGRAM = "python -m vericache_sglang.bench"


def figures_of_the_page():
    page = REPOSITORY / "docs" / "results.md"
    commands = re.findall(rf"`{PROGRAM} ([^`]+)`", page.read_text())
    return [words for each in commands if (words := shlex.split(each))[0][0] != "-"]


def test_the_page_of_results_names_every_benchmark():
    assert {words[0] for words in figures_of_the_page()} == set(BENCHMARKS)


@pytest.mark.parametrize("words", figures_of_the_page(), ids=" ".join)
def test_every_command_of_the_page_is_understood(words, monkeypatch):
    seen = []
    monkeypatch.setattr(Benchmark, "run", lambda self, name, argv: seen.append(self))
    main(words)
    (benchmark,) = seen
    options = benchmark._parser(words[0]).parse_args(words[1:])
    assert options.out in (Path("FILE"), benchmark.out)


def test_an_unknown_name_is_told_with_the_known_ones(capsys):
    assert main(["decoding"]) == 2
    assert "no benchmark decoding" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["sweep", "--points", "6000x4", "6000"], "--points 6000: must be"),
        (["inner", "--points", "0x4"], "--points 0x4: must be"),
        (["inner", "--systems", "magic"], "--systems magic; known: vericache+ngram,"),
    ],
)
def test_a_wrong_option_is_named_before_a_server_starts(words, named, capsys):
    assert main(words) == 2
    assert named in capsys.readouterr().err


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Return a function that runs a benchmark of names; it returns the status.

    A name that begins with "bad" fails, "broken" ends the run.
    """

    def squared(name):
        run.calls.append(name)
        if name == "broken":
            raise KeyboardInterrupt
        return {"square": len(name) ** 2}

    def measure(options, results):
        for name in options.names:
            row = results.row(name, squared, name)
            results.require(not name.startswith("bad"), f"{name} is bad")
            results.figures["last"] = row["square"]

    def run(*words):
        status = main(["toy", "--out", str(run.file), *words])
        return status, capsys.readouterr()

    run.file, run.calls = tmp_path / "toy.json", []
    toy = Benchmark(
        about="Squares of lengths.",
        options={"names": (["a"], "to measure"), "fast": (False, "ignored")},
        measure=measure,
        seed=3,
        page=lambda report: f"{len(report.get('rows', ()))} rows",
        selecting=("names",),
    )
    monkeypatch.setitem(BENCHMARKS, "toy", toy)
    return run


def test_a_report_says_where_it_comes_from_and_what_was_found(bench):
    status, printed = bench("--names", "a", "bcd", "--fast")
    report = json.loads(bench.file.read_text())
    assert status == 0
    assert json.loads(printed.out) == report
    assert [(row["name"], row["square"]) for row in report["rows"]] == [
        ("a", 1),
        ("bcd", 9),
    ]
    assert report["last"] == 9
    assert report["failures"] == []
    options = report["options"]
    assert (options["names"], options["fast"], options["seed"]) == (
        ["a", "bcd"],
        True,
        3,
    )
    assert options["out"] == "toy.json", "no path of this machine"
    origin = report["provenance"]
    assert origin["argv"][0] == "toy"
    assert {"commit", "versions", "hardware"} <= set(origin)
    assert bench.file.with_suffix(".md").read_text() == "2 rows"


def test_a_model_is_a_folder_or_a_name_on_a_hub(tmp_path, monkeypatch, capsys):
    asked = Benchmark(
        about="Its model.",
        options={},
        model=tmp_path,
        measure=lambda options, results: results.figures.update(m=str(options.model)),
    )
    monkeypatch.setitem(BENCHMARKS, "toy", asked)
    monkeypatch.chdir(tmp_path.parent)
    for given, wanted in ((tmp_path.name, str(tmp_path)), ("owner/name", "owner/name")):
        assert main(["toy", "--model", given]) == 0
        assert json.loads(capsys.readouterr().out)["m"] == wanted


def test_what_must_not_be_is_a_status_and_told(bench):
    status, printed = bench("--names", "a", "bad")
    assert status == 1
    assert "FAILED: bad is bad" in printed.err
    assert json.loads(bench.file.read_text())["failures"] == ["bad is bad"]


def test_a_run_goes_on_where_it_was_ended(bench):
    with pytest.raises(KeyboardInterrupt):
        bench("--names", "a", "broken", "bcd")
    assert len(json.loads(bench.file.read_text())["rows"]) == 1
    status, _ = bench("--names", "bcd", "--resume")
    assert status == 0
    assert bench.calls == ["a", "broken", "bcd"], "a was not measured again"
    rows = [row["name"] for row in json.loads(bench.file.read_text())["rows"]]
    assert rows == ["a", "bcd"]
    bench("--names", "bcd")
    assert bench.calls[3:] == ["bcd"], "without --resume everything is"


def test_rows_of_other_options_are_not_kept(bench):
    bench("--names", "a")
    status, printed = bench("--names", "a", "--seed", "4", "--resume")
    assert status == 2
    assert "--seed 3, not 4" in printed.err
    status, printed = bench("--names", "a", "--fast", "--resume")
    assert "--fast False, not True" in printed.err


@pytest.mark.parametrize("content", ["", "[]", '{"rows": [{"seconds": 1}]}'])
def test_a_file_that_is_no_report_is_not_gone_on_with(bench, content):
    bench.file.write_text(content)
    status, printed = bench("--resume")
    assert status == 2
    assert "--resume: toy.json" in printed.err
    assert bench.file.read_text() == content


def test_help_tells_what_an_option_is_by_default(bench, capsys):
    with pytest.raises(SystemExit):
        main(["toy", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "to measure; default: a" in printed
    assert "of prompts and choices; default: 3" in printed
    assert "ignored --" in printed, "a switch has none"


def test_a_file_that_cannot_be_written_is_named(bench, capsys):
    bench.file.mkdir()
    status, printed = bench()
    assert status == 2
    assert "--out:" in printed.err
