"""``python -m sglang.bench_serving`` against a server of ours."""

import json
import sys
from pathlib import Path

import pytest
from live_server import MODEL, fork
from programs.drafting import draw_prompts, expect_drafting

from vericache_sglang.evaluation import export
from vericache_sglang.evaluation.workload import load_tokenizer

pytestmark = [pytest.mark.server, pytest.mark.extended]

STUBS = Path(__file__).parent / "programs" / "stubs"
PROMPT, OUTPUT, REQUESTS = 300, 32, 8
"""Tokens of each prompt and of each answer, and how many are asked, four at a time."""


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """Write demo prompts as the conversations that ``--dataset-name random`` cuts."""
    file = tmp_path_factory.mktemp("bench") / "conversations.json"
    turns = [
        [{"value": prompt.text}, {"value": prompt.answer}]
        for prompt in draw_prompts(REQUESTS, tokens=PROMPT + 60)
    ]
    file.write_text(json.dumps([{"conversations": pair} for pair in turns]))
    return file


def start(server, backend, results, *dataset):
    """Start the benchmark; it writes its results to ``results``."""
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", backend]
    command += ["--base-url", server.url, "--model", str(MODEL), "--disable-tqdm"]
    command += [*dataset, "--num-prompts", str(REQUESTS)]
    command += ["--max-concurrency", "4", "--warmup-requests", "0"]
    command += ["--output-file", str(results), "--output-details"]
    log = results.with_suffix(".log")
    return fork(command, {"PYTHONPATH": str(STUBS)}, log), log


def ended(run):
    process, log = run
    assert process.wait(600) == 0, log.read_text()[-3000:]


def test_an_exported_workload_gets_plain_answers(servers, tmp_path):
    """A data set of the paper, as its synthetic twin, sent as chats."""
    workload = tmp_path / "workload.jsonl"
    flags = ["--tasks", "complex-func-bench", "--samples", str(REQUESTS)]
    assert export.main([*flags, "--context", "600", "--out", str(workload)]) == 0
    dataset = ("--dataset-name", "openai", "--dataset-path", str(workload))
    dataset += ("--sharegpt-output-len", str(OUTPUT))
    answers = []
    with expect_drafting(servers[0]):
        for number, server in enumerate(servers):
            results = tmp_path / f"{number}.jsonl"
            ended(start(server, "sglang-oai-chat", results, *dataset))
            told = json.loads(results.read_text())
            assert told["completed"] == REQUESTS
            answers.append(sorted(told["generated_texts"]))
    assert answers[0] == answers[1]
    assert all(answers[0])


def test_the_benchmark_completes_with_plain_answers(servers, conversations, tmp_path):
    """Both of its clients at once: SGLang's own protocol and OpenAI completions."""
    ours, plain = servers
    cut = ("--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT))
    dataset = ("--dataset-name", "random", "--dataset-path", str(conversations), *cut)
    runs = {}
    with expect_drafting(ours):
        for backend in ("sglang", "sglang-oai"):
            results = tmp_path / f"{backend}.jsonl"
            ratio = ("--random-range-ratio", "1.0")
            runs[results] = start(ours, backend, results, *dataset, *ratio)
        for run in runs.values():
            ended(run)

    tokenizer = load_tokenizer(MODEL)
    ids = [
        tokenizer.encode(each["conversations"][0]["value"])[:PROMPT]
        for each in json.loads(conversations.read_text())
    ]
    texts = [tokenizer.decode(each) for each in ids]
    wanted = plain.generate(texts, max_new_tokens=OUTPUT, ignore_eos=True)
    for results in runs:
        told = json.loads(results.read_text())
        assert told["completed"] == REQUESTS
        assert not any(told["errors"])
        assert told["total_output_tokens"] == REQUESTS * OUTPUT
        assert told["output_lens"] == [OUTPUT] * REQUESTS
        assert told["input_lens"] == [PROMPT] * REQUESTS
        # The benchmark shuffles its prompts.
        assert sorted(told["generated_texts"]) == sorted(
            each["text"] for each in wanted
        )
