"""Generated and traced workloads."""

import statistics
from itertools import islice, pairwise

import pytest

from vericache_sglang.errors import ConfigError
from vericache_sglang.simulation.workload import (
    RequestMix,
    closed_loop,
    poisson,
    trace,
)

MIX = RequestMix(contexts=(10, 20), output=5, accept=0.9, spread=0.2, share=3, seed=4)


def test_a_stream_starts_anew_and_never_ends_in_a_closed_loop():
    loop = closed_loop(MIX, 7, warm=2, concurrency=3)
    assert list(islice(loop.stream(), 50)) == list(islice(loop.stream(), 50))
    assert len(loop.sample()) == 7
    assert (loop.finish, loop.warm, loop.concurrency) == (7, 2, 3)


def test_requests_of_a_group_have_one_prompt():
    requests = closed_loop(MIX, 60).sample()
    for start in range(0, 60, 3):
        assert len({(r.group, r.prompt) for r in requests[start : start + 3]}) == 1
    assert {r.prompt for r in requests} == {10, 20}
    assert len({r.group for r in requests}) == 20
    assert all(0.7 <= r.accept <= 1.0 for r in requests)
    assert len({r.accept for r in requests}) > 30


def test_poisson_arrivals_have_the_rate_asked_for():
    arrivals = [r.arrival_s for r in poisson(MIX, 4000, 8.0).stream()]
    assert arrivals == sorted(arrivals)
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.1)


def test_a_trace_is_sorted_and_its_optional_fields_are_read(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"arrival_s": 2, "prompt_tokens": 30, "output_tokens": 4}\n\n'
        '{"arrival_s": 1, "prompt_tokens": 9, "output_tokens": 2, "p": 0.5, '
        '"group": "a"}\n'
    )
    found = list(trace(file, 0.8).stream())
    assert [(r.arrival_s, r.prompt, r.output, r.accept, r.group) for r in found] == [
        (1.0, 9, 2, 0.5, "a"),
        (2.0, 30, 4, 0.8, ""),
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no request"),
        ('{"arrival_s": 1, "prompt_tokens": 3}', "line 1: 'output_tokens' is missing"),
        ("[1]", "line 1"),
        ("{", "line 1"),
        ('{"arrival_s": -1, "prompt_tokens": 3, "output_tokens": 1}', "arrival_s"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', ">= 1"),
        (
            '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "p": 2}',
            r"\[0, 1\]",
        ),
    ],
)
def test_a_wrong_trace_names_its_line(tmp_path, text, named):
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--trace") as caught:
        trace(file, 0.9)
    assert caught.match(named)


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--trace .*none"):
        trace(tmp_path / "none", 0.9)
