"""The command of section 3: its arithmetic by hand, its page, and one run served."""

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
from live_server import fork

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.benchmark import DEMO, DEMO_LONG, Results
from vericache_sglang.evaluation.benchmarks import divergence
from vericache_sglang.evaluation.benchmarks.divergence import (
    Conversation,
    ask_all,
    distances,
    likeness,
    measure_system,
    prepare,
    systems_of,
)
from vericache_sglang.evaluation.compressor_lines import Line
from vericache_sglang.evaluation.divergence_page import draw_page, page
from vericache_sglang.evaluation.systems import OFF

HALF = [[math.log(0.5), 0, None], [math.log(0.5), 1, None]]
MOST = [[math.log(0.75), 0, None], [math.log(0.25), 1, None]]
STEP = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)


def options(**more):
    given = {
        "model": DEMO_LONG,
        "tasks": ["complex-func-bench"],
        "data": "synthetic",
        "samples": 1,
        "context": 600,
        "output": 96,
        "turns": 3,
        "temperature": 0.5,
        "kl_tokens": 24,
        "top_k": 0,
        "clients": 2,
        "min_prompt": 64,
        "engine": "",
        "seed": 0,
    }
    return Namespace(**{**given, **more})


def sequence(ids, top):
    return {"ids": ids, "top": top}


def test_distances_are_measured_after_the_same_tokens_only():
    full = [sequence([0, 0, 0, 0], [HALF] * 4), sequence([0, 0, 0], [HALF] * 3)]
    got = [
        sequence([0, 0, 0, 0], [HALF, MOST, HALF, MOST]),
        sequence([0, 1, 0], [HALF, MOST, MOST]),
    ]
    found = distances(full, got)
    # The second sequence differs at token 1: what was before it still counts.
    assert found["steps"] == [[round(STEP, 7), 0.0, round(STEP, 7)], [round(STEP, 7)]]
    assert found["same_sequences"] == 1
    assert found["kl_per_step"]["value"] == pytest.approx(3 * STEP / 4)
    assert found["kl_per_sequence"]["value"] == pytest.approx(3 * STEP / 2)


def test_likeness_of_free_answers():
    wanted = [Conversation(("a b", "c"), (1, 2, 3)), Conversation(("x",), (1,))]
    got = [Conversation(("a c", "c"), (1, 9, 3)), Conversation(("x",), (1,))]
    found = likeness(wanted, got)
    assert found["first_divergence"] == [1, None]
    assert found["same_answers"]["value"] == 0.5
    assert found["token_match"]["value"] == pytest.approx((2 / 3 + 1) / 2)


def test_every_compressor_is_served_alone_and_verified():
    lossy, verified = systems_of(Line("kvzip", 0.25), options())
    assert (lossy.lossy, verified.lossy) == (True, False)
    assert lossy.flags == verified.flags
    assert OFF not in lossy.flags
    assert "--enable-deterministic-inference" in lossy.flags


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tasks": ["poems"]}, r"--tasks poems; known: lmcache-trace"),
        ({"model": DEMO, "tasks": ["gsm8k-long"]}, "only demo-model-long can"),
        ({"temperature": 0.0}, "--temperature must be > 0"),
        ({"kl_tokens": 0}, "--kl-tokens must be >= 1"),
        ({"context": 30}, "--context"),
        ({"data": "/nowhere"}, r"--data /nowhere.*ComplexFuncBench\.jsonl"),
    ],
)
def test_what_cannot_be_measured_is_told(more, message):
    with pytest.raises(ConfigError, match=message):
        prepare(options(**more))


def test_files_of_a_task_lie_below_its_name():
    files = Path(__file__).with_name("tasks") / "files"
    study = prepare(options(data=str(files), samples=2))
    assert [each.name for each in study.samples["complex-func-bench"]] == [
        "Hotels-0",
        "Cross-0",
    ]


def reported(value=1.0):
    """Return a report of three systems with figures made up."""

    def spread(at):
        return {"value": at, "low": at, "high": at, "n": 2}

    def row(name, system, score, steps):
        same = spread(score)
        task = {
            "samples": 2,
            "scores": {"success": same},
            "first_divergence": [None, 3 if score < 1 else None],
            **dict.fromkeys(
                ("same_answers", "token_match", "word_f1", "rouge_l"), same
            ),
        }
        if steps is not None:
            task |= {
                "steps": steps,
                **dict.fromkeys(("kl_per_step", "kl_per_sequence"), spread(0.5)),
            }
        return {"name": name, "system": system, "tasks": {"gsm8k-long": task}}

    again = row("full KV, all at once", "full KV, all at once", 1.0, [[0.0]])
    del again["tasks"]["gsm8k-long"]["scores"]
    return {
        "provenance": {
            "command": "python -m vericache_sglang.bench divergence",
            "commit": "abc",
            "date": "2026-11-22T00:00:00",
            "versions": {"sglang": "0.5.21", "torch": "2.13.0"},
            "hardware": {"gpus": [], "cpu": "a CPU"},
        },
        "options": {
            "model": "configs/demo-model-long",
            "samples": 2,
            "data": "synthetic",
            "out": "x.json",
            "temperature": 0.5,
            "kl_tokens": 24,
        },
        "top_k": 586,
        "rows": [
            row("full KV", "full KV", 1.0, None),
            again,
            row("lossy kvzip", "lossy", 0.25, [[0.5, 1.0], [0.25]]),
            row("VeriCache kvzip", "VeriCache", value, [[0.0, 1e-7], [0.0]]),
        ],
        "failures": ["something"],
    }


def test_the_page_has_scores_beside_f1_and_distances():
    text = page(reported())
    lines = [line for line in text.splitlines() if line.startswith("| lossy kvzip")]
    assert "0.25 [0.25, 0.25]" in lines[0]
    assert "3, 1 of 2" in lines[0]
    assert "0.500000 [0.500000, 0.500000]" in lines[1]
    assert "![KL, first divergence and scores](x.svg)" in text
    assert "- something" in text
    assert "586 most probable tokens" in text


def test_the_plots_have_labels_and_are_the_same_for_the_same_report(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    draw_page(reported(), tmp_path / "a.svg")
    draw_page(reported(), tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    for label in ("KL_t, nats", "decoded token t", "share of answers", "lossy kvzip"):
        assert f"<!-- {label} -->" in text
    assert text == (tmp_path / "b.svg").read_text()


def test_what_is_not_lossless_or_not_forced_fails():
    given = Namespace(out=None, resume=False)
    results = Results(divergence.DIVERGENCE, ["divergence"], given)
    results.rows = {row["name"]: row for row in reported(0.5)["rows"]}
    for row in results.rows.values():
        row["tasks"]["gsm8k-long"]["same_sequences"] = 1
    divergence._require(results)
    assert results.failures == [
        "lossy kvzip, gsm8k-long: sequences were not forced",
        "VeriCache kvzip, gsm8k-long: 1 answers differ",
    ]


@pytest.mark.server
@pytest.mark.extended
def test_the_command_measures_the_demo_model():
    """A lossy KV is far from the full KV and wrong, VeriCache near it and right."""
    study = prepare(options(samples=2))
    full = ask_all(study, divergence._described("full KV", None, study.options), fork)
    lossy, verified = systems_of(Line("recency", 0.1), study.options)
    rows = [measure_system(study, each, full, fork) for each in (lossy, verified)]
    alone, ours = (row["tasks"]["complex-func-bench"] for row in rows)
    assert alone["same_sequences"] == ours["same_sequences"] == 2
    assert alone["kl_per_step"]["value"] > 0.01
    assert ours["kl_per_step"]["value"] < 1e-4
    assert alone["scores"]["success"]["value"] < 1
    assert ours["scores"]["success"]["value"] == 1
    assert ours["first_divergence"] == [None, None]
    assert rows[1]["accepted_per_verify"] is not None
    json.dumps(rows)
