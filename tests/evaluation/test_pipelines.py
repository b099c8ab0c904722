"""Pipeline 1 and the peers: their systems, their pages, and a few of them served."""

import json
from contextlib import contextmanager
from xml.etree import ElementTree

import pytest
from live_server import fork

from vericache_sglang.evaluation import inner_drafters
from vericache_sglang.evaluation.benchmark import DEMO, DEMO_HEAD, Results
from vericache_sglang.evaluation.benchmarks import peers, pipeline1
from vericache_sglang.evaluation.benchmarks.divergence import FULL
from vericache_sglang.evaluation.benchmarks.pipeline1 import AGAIN, PIPELINE1
from vericache_sglang.evaluation.command import main
from vericache_sglang.evaluation.figures import spread
from vericache_sglang.evaluation.pipeline_page import (
    draw_pipeline,
    pipeline_page,
    quality,
)
from vericache_sglang.evaluation.server import Server, ServerError

PEERS, PUBLISHED = peers.PEERS, peers.PUBLISHED


def options(*words, benchmark=PIPELINE1):
    return benchmark._parser("it").parse_args(words)


def setting(system, name):
    """Return the value of one of a system's flags."""
    spelled = f"--vericache-{name}"
    flags = system.flags
    return flags[flags.index(spelled) + 1] if spelled in flags else None


def test_the_lossy_sweeps_are_the_papers():
    given = options("--offline", "kvzip", "--quantizers", "turboquant")
    found = pipeline1.lossy_systems(given, prompt_tokens=4096.0)
    assert {each.name: float(setting(each, "keep")) for each in found} == {
        **{f"lossy kvzip, keep {keep}": keep for keep in (0.25, 0.5, 0.75)},
        **{f"lossy snapkv, {n} tokens": n / 4096 for n in (1024, 2048, 4096)},
        **{f"lossy turboquant, {bits} bit": 1.0 for bits in (8, 4, 2)},
    }
    assert setting(found[-1], "compressor") == "turboquant:bits=2"
    assert all(each.lossy for each in found)


def test_a_budget_of_more_than_a_prompt_keeps_it_whole():
    found = pipeline1.lossy_systems(options("--budgets", "9000"), 4096.0)
    whole = [setting(each, "keep") for each in found if "9000 tokens" in each.name]
    assert whole == ["1.0"]


def test_verified_systems_are_lossless_and_named_ones_draft_as_published():
    found = {each.name: each for each in pipeline1.lossless_systems(options())}
    found |= {each.name: each for each in peers.systems_of(options(benchmark=PEERS))}
    assert not any(each.lossy for each in found.values())
    lengths = {
        name: (setting(each, "residency"), setting(each, "draft-length"))
        for name, each in found.items()
        if each.alteration
    }
    assert lengths == {
        "VeriCache, host": ("host", "25"),
        "as SparseSpec": ("device", "8"),
        "MagicDec, StreamingLLM": ("device", "3"),
        "MagicDec, SnapKV": ("device", "3"),
        "QuantSpec": ("device", "8"),
        "SparseSpec": ("device", "8"),
        "TriForce": ("device", "8"),
        "EAGLE3": (None, None),
    }
    assert found.keys() >= PUBLISHED.keys()


def test_a_drafter_is_measured_alone_and_under_vericache():
    """The demo model has a head, the long one has none: it is named as left out."""
    given = options("--model", str(DEMO))
    found = {each.name: each for each in pipeline1.lossless_systems(given)}
    composed = found["VeriCache + EAGLE3"]
    assert setting(composed, "inner") == setting(found["EAGLE3 alone"], "inner")
    assert setting(composed, "compressor") == setting(found["VeriCache"], "compressor")
    assert str(DEMO_HEAD) in composed.flags
    assert int(setting(found["EAGLE3 alone"], "min-prompt")) > 32768, "never compressed"
    mine, left = inner_drafters.chosen(options())
    assert [each.name for each in mine] == ["small model", "n-gram"]
    assert left.keys() == {"EAGLE3"}
    assert "demo-model-long" in left["EAGLE3"]
    (head,), left = inner_drafters.chosen(options("--drafters", "eagle3=some/head"))
    assert (head.weights, left) == ("some/head", {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pipeline1", "--rates", "0"), "--rates > 0"),
        (("peers", "--repeats", "0"), "--repeats must be >= 1"),
        (("pipeline1", "--budgets", "0"), "--budgets and --pools must be >= 1"),
        (("pipeline1", "--offline", "nothing"), "nothing"),
        (("peers", "--compressor", "nothing"), "nothing"),
        (("peers", "--tasks", "poems"), "--tasks poems"),
        (("peers", "--drafters", "parrot"), "--drafters parrot"),
        (("peers", "--drafters", "ngram", "ngram"), "each once"),
        (("pipeline1", "--drafters", "ngram=folder"), "--drafters ngram=folder"),
    ],
)
def test_what_cannot_be_measured_is_told_before_a_server_starts(words, message, capsys):
    assert main([*words]) == 2
    assert message in capsys.readouterr().err


def row(name, speed, score=1.0, *, lossy=False, **more):
    """Return a row made up: two passes, at ``speed`` and a tenth above it."""
    times = spread([0.5, 1.5])
    task = {
        "scores": {"success": {"value": score, "low": 0.0, "high": 1.0, "n": 2}},
        "first_divergence": [None, 3],
        **dict.fromkeys(("token_match", "word_f1", "rouge_l"), None),
    }
    figures = {
        "requests": 2,
        "failed_requests": 0,
        **dict.fromkeys(("ttft_s", "itl_s", "latency_s"), times),
    }
    passes = [{**figures, "tokens_per_s": each} for each in (speed, 1.1 * speed)]
    return {
        "name": name,
        "about": "",
        "lossy": lossy,
        "commit": "abc",
        "concurrency": 4,
        "tokens_per_s": {"median": speed, "min": speed, "max": 1.1 * speed},
        **{key: figures[key] for key in ("ttft_s", "itl_s", "latency_s")},
        "accepted": None,
        **dict.fromkeys(("moved_bytes_per_token", "link_share", "kv_read_share")),
        "accepted_per_verify": None if name.startswith(FULL) else 5.25,
        "proposals_per_row": 1.5 if name == "EAGLE3" else None,
        "mismatches": 1 if lossy else 0,
        "failed_requests": 0,
        "rounds": passes,
        "open_loop": [] if lossy else [{"rate": 2.0, **passes[0]}],
        "replay": [],
        "tasks": {"gsm8k-long": task},
        **more,
    }


def reported(*rows):
    return {
        "provenance": {
            "command": "python -m vericache_sglang.bench pipeline1",
            "commit": "abc",
            "date": "2026-11-22T00:00:00",
            "versions": {"sglang": "0.5.21", "torch": "2.13.0"},
            "hardware": {"gpus": [], "cpu": "a CPU"},
        },
        "options": {
            **{"model": "m", "data": "synthetic", "samples": 2, "out": "x.json"},
            **{"clients": 4, "prefill": "cached", "one_at_a_time": True},
        },
        "prompts": {"requests": 2, "mean_tokens": 700.4, "max_tokens": 900},
        "left_out": {"EAGLE3": "needs a drafter"},
        "rows": [row(FULL, 100.0), *rows, row(AGAIN, 90.0)],
        "failures": ["something"],
    }


POOLED = (
    row(f"{FULL}, pool 900", 50.0, pool=900, tasks={}, open_loop=[]),
    row("VeriCache, pool 900", 75.0, pool=900, tasks={}, open_loop=[]),
)


def cells(text, name):
    """Return the cells of every line of a table that begins with ``name``."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_ratios_to_the_full_kv_of_the_same_pool():
    text = pipeline_page(reported(row("VeriCache", 200.0), *POOLED))
    assert cells(text, "VeriCache")[0][3] == "2.10 (2.00 to 2.20)"
    assert cells(text, "VeriCache, pool 900")[0][3] == "1.57 (1.50 to 1.65)"
    assert "(`full KV, again`, which is noise: 0.95)" in text
    titles = [line for line in text.splitlines() if line.startswith(("# ", "## "))]
    unmarked = ["## Not measured by this command", "## Failures"]
    assert [title for title in titles if "(MEASURED)" not in title] == unmarked
    assert "- EAGLE3: needs a drafter." in text
    assert "- something" in text
    assert "### gsm8k-long" in text


def test_a_system_that_failed_has_no_figures():
    failed = {
        **{"name": "VeriCache", "about": "", "lossy": False, "commit": "abc"},
        "error": "did not start",
    }
    assert cells(pipeline_page(reported(failed)), "VeriCache") == []
    assert cells(peers.page(reported(failed)), "VeriCache")[0][1] == "not measured"


def test_quality_is_over_the_full_kvs_scores():
    full = row(FULL, 1.0, 0.8)
    assert quality(row("lossy kvzip, keep 0.25", 1.0, 0.2), full) == pytest.approx(0.25)
    assert quality(row("pool", 1.0, tasks={}), full) is None
    assert quality(row("x", 1.0), row(FULL, 1.0, 0.0)) is None


def test_published_figures_stand_beside_ours():
    eagle = row("EAGLE3", 120.0, accepted_per_verify=None)
    text = peers.page(reported(row("QuantSpec", 150.0), eagle))
    shown = {line[0]: line[1:] for name in PUBLISHED for line in cells(text, name)[:1]}
    assert shown["QuantSpec"][0] == "1.57x, 5.2 accepted a verification"
    assert "2.49x at 128K" in shown["QuantSpec"][1]
    assert shown["EAGLE3"][0] == "1.26x, 1.5 proposals accepted a row"
    assert shown["TriForce"][0] == "not measured"
    assert set(shown) == set(PUBLISHED)


def test_the_plots_have_labels_and_are_the_same_for_the_same_report(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    lossy = [row(f"lossy kvzip, keep {k}", 150.0, k, lossy=True) for k in (0.25, 0.5)]
    report = reported(row("VeriCache", 200.0), *lossy, *POOLED)
    for name in ("a.svg", "b.svg"):
        draw_pipeline(report, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    arrivals = "Poisson arrivals: p50, dotted p99"
    for label in ("tokens/s / full KV's", "KV slots", "lossy kvzip", arrivals):
        assert f"<!-- {label} -->" in text
    assert "MEASURED" in text
    assert text == (tmp_path / "b.svg").read_text()


@contextmanager
def up(system, model, start=None):
    """Stand for ``served``: VeriCache does not start."""
    if system.has_vericache:
        raise ServerError("no memory")
    yield Server("http://127.0.0.1:9")


def test_a_server_that_fails_is_a_row_with_an_error(monkeypatch, tmp_path):
    """All but the measuring itself, with pools: every page on the way is written."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")

    def measured(study, load, server, system, full):
        made = row(system.name, 100.0, pool=full.pool)
        return made if full.answers else {**made, "tasks": {}}

    monkeypatch.setattr(pipeline1, "served", up)
    monkeypatch.setattr(pipeline1, "answered", measured)
    monkeypatch.setattr(pipeline1, "reference", lambda study, server: {"a": 1})
    monkeypatch.setattr(pipeline1.TaskRequests, "ask", lambda self, server, given: None)
    words = ["pipeline1", "--samples", "1", "--context", "600", "--pools", "900"]
    words += ["--budgets", "64", "--keeps", "0.5", "--bits", "4"]
    assert main([*words, "--out", str(tmp_path / "p.json")]) == 1
    report = json.loads((tmp_path / "p.json").read_text())
    good = [each["name"] for each in report["rows"] if "error" not in each]
    assert good == [FULL, AGAIN, f"{FULL}, pool 900"]
    failed = {each["name"]: each for each in report["rows"] if "error" in each}
    assert failed["VeriCache, pool 900"]["pool"] == 900
    assert "VeriCache, pool 900: no memory" in report["failures"]
    assert (tmp_path / "p.svg").exists()


@pytest.mark.parametrize("name", ["pipeline1", "peers"])
def test_a_killed_run_resumes_and_gives_the_same_table(monkeypatch, tmp_path, name):
    """The third server takes the process down; rows before it are not measured again.

    A system's row depends on the system alone here, so that what differs is the order
    and the choice of rows, which the resumed run answers for.
    """
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    asked, fatal = [], ["a server that kills"]

    @contextmanager
    def serves(system, model, start=None):
        yield Server("http://127.0.0.1:9")

    def measured(study, load, server, system, full):
        if system.name in fatal:
            raise SystemExit(143)
        asked.append(system.name)
        return row(system.name, 100.0 + len(system.name), lossy=system.lossy)

    monkeypatch.setattr(pipeline1, "served", serves)
    monkeypatch.setattr(pipeline1, "answered", measured)
    monkeypatch.setattr(pipeline1, "reference", lambda study, server: {"a": 1})
    monkeypatch.setattr(pipeline1.TaskRequests, "ask", lambda self, server, given: None)
    words = [name, "--samples", "1", "--context", "600", "--out"]

    def table(file):
        text = file.with_suffix(".md").read_text()
        return [line for line in text.splitlines() if line.startswith(("| ", "- "))]

    assert main([*words, str(tmp_path / "whole.json")]) == 0
    whole, asked[:] = [*asked], []
    fatal[:] = whole[3:4]
    with pytest.raises(SystemExit):
        main([*words, str(tmp_path / "cut.json")])
    assert asked == whole[:3]
    fatal.clear()
    assert main([*words, str(tmp_path / "cut.json"), "--resume"]) == 0
    assert asked == whole
    assert table(tmp_path / "cut.json") == table(tmp_path / "whole.json")
    assert (tmp_path / "cut.svg").read_text() == (tmp_path / "whole.svg").read_text()


@pytest.mark.server
@pytest.mark.extended
def test_systems_are_measured_beside_plain_sglang(tmp_path):
    """SparseSpec-like drafts are the full KV's answers, a small lossy KV is not."""
    small = ("--samples", "2", "--context", "600", "--output", "48", "--turns", "1")
    more = ("--kl-tokens", "40", "--min-prompt", "64", "--repeats", "1")
    given = options(
        *(*small, *more, "--rates", "8", "--tasks", "lmcache-trace"),
        *("--offline", "recency", "--keeps", "0.1", "--budgets", "64"),
        *("--out", str(tmp_path / "p.json")),
    )
    results = Results(PIPELINE1, ["pipeline1"], given)
    study = pipeline1.prepared(given, results, {})
    (sparse,) = [
        each
        for each in pipeline1.lossless_systems(given)
        if each.name == "as SparseSpec"
    ]
    lossy = pipeline1.lossy_systems(given, 600.0)[0]
    pipeline1.measure(study, [sparse, lossy], results, fork)
    assert results.failures == []
    plain, ours, alone, again = results.rows.values()
    assert (plain["name"], again["name"]) == (FULL, AGAIN)
    assert ours["ratio"]["median"] > 0
    assert plain["mismatches"] == ours["mismatches"] == again["mismatches"] == 0
    assert alone["mismatches"] > 0
    assert [each["rate"] for each in ours["open_loop"]] == [8.0]
    assert [each["requests"] for each in ours["replay"]] == [2]
    assert alone["open_loop"] == alone["replay"] == []
    counted = ours["rounds"][0]["counters"]
    assert counted["drafted"] > 4 * counted["cycles"], "drafts are long, as asked"
    far, near = (each["tasks"]["lmcache-trace"] for each in (alone, ours))
    assert far["kl_per_step"]["value"] > near["kl_per_step"]["value"]
    assert near["kl_per_step"]["value"] < 1e-4
    assert json.loads((tmp_path / "p.json").read_text())["rows"]
    assert "as SparseSpec" in (tmp_path / "p.md").read_text()
