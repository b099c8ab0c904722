"""Exported workloads are what the load generators' own readers expect."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from vericache_sglang.evaluation.benchmark import DEMO_LONG
from vericache_sglang.evaluation.export import main
from vericache_sglang.evaluation.tasks.catalog import TASKS
from vericache_sglang.evaluation.workload import open_tokenizer

SAMPLES = 4
STUBS = Path(__file__).parents[1] / "end_to_end" / "programs" / "stubs"


@pytest.fixture(scope="module")
def tokenizer():
    return open_tokenizer(DEMO_LONG)


@pytest.fixture(scope="module")
def readers():
    """SGLang's data sets, without the library with which it reads others from a hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUBS)
        yield import_module("sglang.benchmark.datasets")
    sys.modules.pop("datasets", None)


def exported(folder, *flags):
    out = folder / "workload"
    given = ["--samples", str(SAMPLES), "--context", "700", "--out", str(out), *flags]
    assert main(given) == 0
    return out


@pytest.mark.parametrize("task", TASKS)
def test_sglang_reads_requests(tmp_path, tokenizer, readers, task):
    out = exported(tmp_path, "--tasks", task, "--format", "openai")
    rows = readers.OpenAIDataset(str(out), 0, None).load(tokenizer)
    assert len(rows) == SAMPLES
    for row, line in zip(rows, out.read_text().splitlines(), strict=True):
        told = json.loads(line)
        assert row.prompt == told["messages"]
        assert row.output_len == told["max_tokens"] > 0
        assert row.extra_request_body["temperature"] >= 0


def test_sglang_reads_sessions_turn_by_turn(tmp_path, tokenizer, readers):
    flags = ("--tasks", "lmcache-trace", "gsm8k-long", "--format", "agentic-trace")
    out = exported(tmp_path, *flags)
    rows = readers.AgenticTraceDataset(str(out), 0, None, 0, None).load(tokenizer)
    # A session of three turns, the first turn of the next; single requests.
    assert [len(row.prompt) for row in rows] == [3, 1, *[1] * SAMPLES]
    first = rows[0].prompt
    assert [each["role"] for each in first[0]] == ["system", "user"]
    assert [[each["role"] for each in turn] for turn in first[1:]] == [["user"]] * 2
    turns = json.loads(out.read_text())["conversations"][0]
    tokens = [turn["prompt_tokens"] for turn in turns]
    assert tokens == sorted(set(tokens)), "each turn has the turns before"
    assert rows[0].prompt_len == tokens[0]


def test_vllm_gets_prompts_as_the_server_would_render_them(tmp_path):
    flags = ("--tasks", "complex-func-bench", "gsm8k-long", "--format", "custom")
    lines = exported(tmp_path, *flags).read_text().splitlines()
    assert len(lines) == 2 * SAMPLES
    for line in map(json.loads, lines):
        assert line.keys() == {"prompt", "output_tokens"}
        assert line["output_tokens"] > 0
        assert len(line["prompt"]) > 500


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tasks", "trivia"], "--tasks trivia"),
        (["--samples", "0"], "--samples"),
        (["--data", "/nowhere"], "--data /nowhere"),
        (["--model", "/nowhere"], "--model /nowhere"),
    ],
)
def test_a_wrong_flag_is_named(tmp_path, capsys, flags, named):
    assert main(["--out", str(tmp_path / "file"), *flags]) == 2
    assert named in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
