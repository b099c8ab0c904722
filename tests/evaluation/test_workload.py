"""Requests from files, from random tokens and from the demo model's documents."""

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.workload import (
    BenchRequest,
    arrivals,
    demo_requests,
    random_requests,
    read_requests,
)

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"


def test_arrivals_are_poisson_and_the_same_pattern_at_every_rate():
    times = arrivals(4001, 2.0, seed=7)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0
    # Mean and deviation of an exponential are both 1 / rate.
    assert statistics.fmean(gaps) == pytest.approx(0.5, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(0.5, rel=0.06)
    slower = arrivals(4001, 0.5, seed=7)
    assert slower == pytest.approx([4 * at for at in times])
    assert arrivals(10, 2.0, seed=8) != times[:10]


def test_a_file_gives_texts_and_token_ids(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text('{"prompt": "hi"}\n\n{"input_ids": [5, 0], "output_tokens": 3}\n')
    assert read_requests(file, 9) == [BenchRequest("hi", 9), BenchRequest((5, 0), 3)]


def test_a_body_is_greedy_and_of_fixed_length_unless_it_may_end():
    body = BenchRequest((5, 6), 3).body(ends=False)
    assert body["input_ids"] == [5, 6]
    assert body["sampling_params"] == {
        "temperature": 0.0,
        "max_new_tokens": 3,
        "ignore_eos": True,
    }
    body = BenchRequest("hi", 3).body(ends=True)
    assert body["text"] == "hi"
    assert body["sampling_params"]["ignore_eos"] is False


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2"),
        ("[]", "prompt or input_ids"),
        ("{}", "prompt or input_ids"),
        ('{"prompt": "a", "input_ids": [1]}', "prompt or input_ids"),
        ('{"prompt": ""}', "prompt must be"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens must be >= 1"),
        ('{"prompt": "a", "output_tokens": true}', "output_tokens must be >= 1"),
        ('{"input_ids": []}', "input_ids must be"),
        ('{"input_ids": [-1]}', "input_ids must be"),
        ('{"input_ids": ["a"]}', "input_ids must be"),
        ('{"input_ids": 4}', "input_ids must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, named):
    file = tmp_path / "r.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(ConfigError, match=named):
        read_requests(file, 9)


def test_a_file_without_requests_is_refused(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="has no line"):
        read_requests(file, 9)
    with pytest.raises(ConfigError, match="nowhere"):
        read_requests(tmp_path / "nowhere", 9)


def test_random_prompts_are_of_the_models_tokens(tmp_path):
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    drawn = random_requests(MODEL, [300, 20], 9, seed=1)
    assert [len(request.prompt) for request in drawn] == [300, 20]
    assert all(0 < min(r.prompt) <= max(r.prompt) < vocabulary for r in drawn)
    assert drawn == random_requests(MODEL, [300, 20], 9, seed=1)
    assert drawn != random_requests(MODEL, [300, 20], 9, seed=2)
    with pytest.raises(ConfigError, match="vocab_size"):
        random_requests(tmp_path, [300], 9, seed=1)


def test_demo_prompts_are_as_long_as_asked(tmp_path):
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    drawn = demo_requests(MODEL, [400, 900], 9, seed=1)
    for request, length in zip(drawn, (400, 900), strict=True):
        tokens = len(tokenizer.encode(request.prompt, add_special_tokens=False).ids)
        assert length - 60 < tokens <= length
        assert request.prompt.endswith("<|assistant|>")
    with pytest.raises(ConfigError, match="--requests FILE"):
        demo_requests(tmp_path, [400], 9, seed=1)
    with pytest.raises(ConfigError, match="--context"):
        demo_requests(MODEL, [5], 9, seed=1)
