"""Two tensor-parallel ranks: plain SGLang's tokens, and one plan in every iteration.

SGLang's strict memory checks are on, so the ranks compare their plans each time: a run
that ends has proven that they were equal.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from live_server import faulty, run

from vericache_sglang.evaluation import altered
from vericache_sglang.evaluation.lossless import compare, waves
from vericache_sglang.evaluation.matrix import METHODS, PLAIN, system
from vericache_sglang.evaluation.server import ServerError
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
HELD = ("kept_slots", "staging_slots", "host_bytes", "query_tails", "running")
TWO = {"tp_size": 2}

BY_HEAD = [
    next(line for line in METHODS if line.startswith("kvquant")),
    # One KV head a rank: a group is its 64 columns.
    next(line for line in METHODS if line.startswith("rotatekv")) + ",group=64",
]
"""Codecs with calibrated tables, a row of them for every KV head."""

pytestmark = [pytest.mark.server, pytest.mark.extended]


@pytest.fixture(scope="module")
def requests():
    """Prompts of many lengths at once; the same again from the prefix cache; ends."""
    return waves(load_tokenizer(MODEL), prompts=8, longest=1500, seed=7)[:3]


@pytest.fixture(scope="module")
def plain(requests):
    return run(described("plain", None, TWO), MODEL, requests)


def run_with(fault, waves, engine=None, **settings):
    engine, environment = {**TWO, **(engine or {})}, faulty(fault)
    broken = system(fault, engine=engine, environment=environment, **settings)
    return run(broken, MODEL, waves)


def test_plain_sglang_answers_on_two_ranks_as_on_one(requests, plain):
    """So what the other tests compare with is the answer, not one of two."""
    assert compare(run(PLAIN, MODEL, requests[:1]), first(plain)) == []
    answers = {tuple(answer["ids"]) for answer in plain["waves"][0]}
    assert len(answers) == len(plain["waves"][0])


def test_a_bad_rank_costs_all_ranks_the_same_and_no_token(requests, plain):
    """Rank 1 gets copies late, loses some and has its host memory damaged."""
    ours = run_with("one_bad_rank", [*requests, unseeded(requests)], draft_length=8)
    kept = {"waves": ours["waves"][: len(requests)]}
    assert compare(plain, kept) == []
    state = ours["state"]
    assert state["cycles"] > 50
    assert state["failed_prefetches"] > 5, "rank 0 never failed by itself"
    assert state["reprefills"] > 0
    assert {name: state[name] for name in HELD} == dict.fromkeys(HELD, 0)
    drawn = [answer["ids"] for answer in ours["waves"][-1]]
    assert [len(ids) for ids in drawn] == [24] * len(drawn)


@pytest.mark.parametrize("call", ["keep_share", "scores"])
def test_a_compressor_that_fails_on_one_rank_fails_on_both(call, requests, plain):
    line = f"test-faulty-share:call={call},rank=1"
    ours = run(
        system(line, engine=TWO, compressor=line, draft_length=8), MODEL, requests[:1]
    )
    assert compare(first(plain), ours) == []
    assert ours["state"]["compressor_failures"] > 0
    assert ours["state"]["cycles"] == 0, "one of the ranks drafted"
    assert {name: ours["state"][name] for name in HELD} == dict.fromkeys(HELD, 0)


def test_tokens_are_identical_while_everything_moves(requests, plain):
    """Random splits, offloads, pins, parks, resumes and unsplits on both ranks."""
    ours = run_with(
        "restless", requests, {"page_size": 16}, draft_length=16, compressor="snapkv"
    )
    assert compare(plain, ours) == []
    state = ours["state"]
    moves = ("compressions", "fallbacks", "offloads", "loads", "swap_outs", "swap_ins")
    made = {name: state[name] for name in moves}
    assert all(made.values()), str(made)
    assert {name: state[name] for name in HELD} == dict.fromkeys(HELD, 0)


@pytest.mark.parametrize("line", BY_HEAD, ids=["kvquant", "rotatekv"])
def test_tables_of_a_codec_are_cut_by_head(line, requests, plain):
    """Each rank packs and reads its own heads with its own part of the tables."""
    served = system(line, engine=TWO, compressor=line, draft_length=8)
    ours = run(served, MODEL, requests[:1])
    assert compare(first(plain), ours) == []
    state = ours["state"]
    assert state["compressions"] > 0
    assert state["accepted"] > 0.3 * state["drafted"]
    assert {name: state[name] for name in HELD} == dict.fromkeys(HELD, 0)


@pytest.mark.parametrize(
    ("inner", "weights"),
    # On a CPU SGLang cannot cut a model of one KV head: the served one proposes.
    [("model", "demo-model"), ("eagle3", "demo-model-eagle3")],
    ids=["model", "eagle3"],
)
def test_drafters_with_weights_propose_alike_on_both_ranks(
    inner, weights, requests, plain
):
    """Each rank computes with its part of the drafter's weights.

    Every row has proposals whatever they cost: on a loaded machine they may not pay.
    """
    engine = {**TWO, "speculative_draft_model_path": str(MODEL.with_name(weights))}
    served = system(inner, engine=engine, inner=inner, draft_length=8)
    served = replace(served, alteration=altered.LONGEST)
    ours = run(served, MODEL, requests[:1])
    assert compare(first(plain), ours) == []
    state = ours["state"]
    proposed, accepted = (
        [state[f"inner_{what}_{row}"] for row in ("draft", "verify")]
        for what in ("proposed", "accepted")
    )
    assert all(proposed)
    assert sum(accepted) > 0.2 * sum(proposed)
    assert {name: state[name] for name in HELD} == dict.fromkeys(HELD, 0)


def test_ranks_that_do_not_listen_are_stopped(requests):
    """Were the plans not compared, the ranks would wait for each other for ever."""
    with pytest.raises(ServerError, match="plan differently in iteration"):
        run_with("deaf_ranks", requests[:1], draft_length=8)


def first(report):
    return {"waves": report["waves"][:1]}


def unseeded(requests):
    """Sampled without a seed: every rank has to draw alike, or answers part."""
    prompts = requests[0]["prompts"][:4]
    sampled = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
    return {"prompts": prompts, "params": [sampled] * 4}
