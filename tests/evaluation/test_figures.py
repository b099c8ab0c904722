"""Rates, percentiles and waits, against values worked out by hand."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.evaluation.client import Answer, Pass
from vericache_sglang.evaluation.figures import (
    accepted,
    decode_rate,
    latencies,
    median_interval,
    middle,
    mismatches,
    pass_figures,
    spread,
    token_waits,
)


def test_a_spread_by_hand():
    got = spread([4.0, 1.0, 3.0, 2.0])
    assert got == {
        "mean": 2.5,
        "p10": pytest.approx(1.3),
        "p50": 2.5,
        "p90": pytest.approx(3.7),
        "p99": pytest.approx(3.97),
        "max": 4.0,
        "n": 4,
    }
    assert json.loads(json.dumps(got)) == got, "plain numbers"


def test_nothing_has_no_spread():
    assert spread([]) is None
    assert middle([]) is None


def test_repeats_are_told_by_median_and_extremes():
    assert middle([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert middle([1.0, 2.0])["median"] == 1.5


@pytest.mark.parametrize(("n", "outside"), [(1, 0), (7, 0), (9, 1), (40, 13)])
def test_the_interval_of_a_median_by_tables_of_the_sign_test(n, outside):
    assert median_interval(range(n)) == (outside, n - 1 - outside)


def test_a_burst_is_one_wait_and_then_none():
    assert token_waits([(1.0, 1), (1.5, 4), (3.5, 5)]) == [0.5, 0.0, 0.0, 2.0]
    assert token_waits([(1.0, 1)]) == []


def test_decoding_is_measured_while_every_request_decodes():
    slow = Answer(sent=0.0, times=((1.0, 1), (4.0, 5), (6.0, 9), (9.0, 20)))
    late = Answer(sent=0.0, times=((3.0, 1), (5.0, 11), (7.0, 21)))
    # From 3 s to 7 s: 9 - 1 and 21 - 1 tokens.
    assert decode_rate([slow, late]) == 28 / 4
    assert decode_rate([late]) == 20 / 4
    after = Answer(sent=0.0, times=((8.0, 1), (9.0, 2)))
    assert decode_rate([late, after]) is None
    assert decode_rate([Answer(sent=0.0)]) is None


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 9)), min_size=1))
def test_waits_are_one_fewer_than_tokens_and_add_up(steps):
    at, tokens, times = 0.0, 0, []
    for gap, more in steps:
        at, tokens = at + gap, tokens + more
        times.append((at, tokens))
    waits = token_waits(times)
    assert len(waits) == tokens - steps[0][1]
    assert math.isclose(sum(waits), times[-1][0] - times[0][0], abs_tol=1e-9)


def test_a_pass_by_hand():
    """Two answers of 3 and 2 tokens in 4 s, and one that failed."""
    answers = (
        Answer(
            sent=0.0,
            times=((1.0, 1), (2.0, 3)),
            ended=2.0,
            ids=(7, 8, 9),
            prompt_tokens=100,
            cached_tokens=1,
        ),
        Answer(sent=1.0, times=((2.5, 1), (4.0, 2)), ended=4.0, ids=(7, 8)),
        Answer(sent=1.0, times=((1.1, 1),), ended=1.2, ids=(1,), error="HTTP 500"),
    )
    before = {"cycles": 2, "accepted": 10, "staged_bytes": 500, "prefetch_seconds": 1.0}
    after = {
        "cycles": 6,
        "accepted": 30,
        "staged_bytes": 1500,
        "offloaded_bytes": 200,
        "prefetch_seconds": 2.0,
        "kv_read_bytes_per_s": 3e9,
    }
    got = pass_figures(Pass(answers, 4.0), before, after, memory_gbps=12.0)
    assert got["output_tokens"] == 5
    assert got["tokens_per_s"] == 1.25
    assert got["failed_requests"] == 1
    assert got["errors"] == ["HTTP 500"]
    assert got["prompt_tokens"] == 100
    assert got["cached_prompt_tokens"] == 1
    assert got["ttft_s"]["mean"] == 1.25  # 1.0 and 1.5; the failed one's is not in
    assert got["ttft_s"]["n"] == 2
    assert got["latency_s"]["max"] == 3.0
    assert got["itl_s"]["n"] == 3  # 1.0 and 0.0, then 1.5
    assert got["itl_s"]["mean"] == pytest.approx(2.5 / 3)
    assert got["burst_s"]["n"] == 2
    assert got["accepted_per_verify"] == 5.0
    assert got["moved_bytes_per_token"] == (1000 + 200) / 5
    assert got["link_share"] == 0.25
    assert got["kv_read_share"] == 0.25


def test_plain_sglang_has_no_link_and_no_verifications():
    got = pass_figures(Pass((Answer(sent=0.0, ids=(1,)),), 1.0), {}, {}, 100.0)
    assert got["link_share"] is None
    assert got["kv_read_share"] is None
    assert got["accepted_per_verify"] is None
    assert got["moved_bytes_per_token"] == 0.0


def test_answers_without_tokens_have_no_latency():
    assert latencies([Answer(sent=0.0, error="gone")])["ttft_s"] is None


def test_mismatches_are_by_tokens_and_failures_do_not_count():
    right = Pass((Answer(sent=0, ids=(1, 2)), Answer(sent=0, ids=(3,))), 1.0)
    wrong = Pass((Answer(sent=0, ids=(1, 4)), Answer(sent=0, ids=())), 1.0)
    failed = Pass((right.answers[0], Answer(sent=0, ids=(), error="gone")), 1.0)
    assert mismatches(right, right) == 0
    assert mismatches(right, wrong) == 2
    assert mismatches(right, failed) == 0


def test_accepted_drafts_are_told_for_each_verification():
    one = Answer(sent=0, drafting={"accepted_histogram": [1, 0, 2]})
    two = Answer(sent=0, drafting={"accepted_histogram": [0, 1]})
    got = accepted([one, two, Answer(sent=0)])  # 0, 2, 2 and 1
    assert got["n"] == 4
    assert got["mean"] == 1.25
    assert got["p50"] == 1.5
    assert accepted([Answer(sent=0)]) is None
