"""The promise, for every sampling kind: plain SGLang's tokens and log-probabilities.

Both engines keep seeds (``enable_deterministic_inference``); what a wave is, and why
plain SGLang is stable on it, is said in ``evaluation/sampled.py``. More settings:
``python -m vericache_sglang.bench sampling``.
"""

from pathlib import Path

import pytest
from live_server import faulty, informed, run

from vericache_sglang.evaluation.lossless import compare
from vericache_sglang.evaluation.matrix import PLAIN
from vericache_sglang.evaluation.sampled import (
    ENGINE,
    SETTINGS,
    logprob_entries,
    logprob_gap,
    sampled_waves,
)
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer

GAP = 5e-4
"""Plain SGLang's own prefill and decode differ by 1.3e-4 at one of these positions."""

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
HELD = ("kept_slots", "staging_slots", "host_bytes", "query_tails", "running")

DEPENDENT = {
    *("frequency and presence penalty", "repetition penalty, top-k"),
    *("all penalties, greedy", "every parameter", "minimum of new tokens"),
    *("regex", "regex, greedy", "JSON schema", "EBNF", "custom processor"),
    "regex, end token ignored",
}
"""Kinds in which a token depends on the tokens before, beyond their KV."""

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def waves():
    return sampled_waves(load_tokenizer(MODEL), each=4, longest=700, tokens=20, seed=3)


@pytest.fixture(scope="module")
def plain(waves):
    return run(described(PLAIN.name, None, ENGINE), MODEL, waves)


@pytest.fixture(scope="module")
def ours(waves):
    settings = {**SETTINGS, "residency": "host"}
    return run(described("ours", settings, ENGINE), MODEL, waves)


def test_the_baseline_proves_something(waves, plain):
    """Sampled answers are not the greedy ones, and kinds differ from each other."""
    assert sum(len(wave["prompts"]) for wave in waves) >= 90
    answers = {
        wave["kind"]: [tuple(answer["ids"]) for answer in answers]
        for wave, answers in zip(waves, plain["waves"], strict=True)
    }
    greedy = answers["log-probabilities, greedy"]
    for kind in ("temperature", "top-p", "top-k", "min-p", "every parameter"):
        pairs = zip(answers[kind], greedy, strict=True)
        assert sum(a != b for a, b in pairs) >= 0.6 * len(greedy), kind
    first = [ids[0] for ids in answers.values()]
    assert len(set(first)) >= 0.6 * len(first)
    assert logprob_entries(plain) >= 1200


def test_tokens_are_identical(plain, ours):
    assert compare(plain, ours) == []


def test_it_really_drafted(ours):
    state = ours["state"]
    assert state["drafted"] >= 600
    assert 0.2 * state["drafted"] < state["accepted"] < 0.99 * state["drafted"]
    assert {name: state[name] for name in HELD} == dict.fromkeys(HELD, 0)


def test_log_probabilities_are_the_full_kvs(plain, ours):
    assert logprob_gap(plain, ours) < GAP
    assert logprob_entries(ours) == logprob_entries(plain)


@pytest.fixture(scope="module")
def bound(waves, plain):
    """Waves whose sampling depends on all tokens before, and what plain answered."""
    pairs = [
        (wave, answers)
        for wave, answers in zip(waves, plain["waves"], strict=True)
        if wave["kind"] in DEPENDENT
    ]
    asked, answered = map(list, zip(*pairs, strict=True))
    assert len(asked) == len(DEPENDENT)
    return asked, {**plain, "waves": answered}


@pytest.mark.parametrize(
    ("drafter", "settings"),
    [
        ("oracle", {"residency": "host"}),
        pytest.param(*("oracle", {"residency": "device"}), marks=pytest.mark.extended),
        pytest.param(*("oracle", {"min_prompt": 1 << 20}), marks=pytest.mark.extended),
        pytest.param(*("random", {"residency": "host"}), marks=pytest.mark.extended),
    ],
)
def test_masks_and_penalties_follow_proposals(drafter, settings, bound, tmp_path):
    asked, plain = bound
    own = {**SETTINGS, "inner": "ngram", **settings}
    environment = informed(asked, plain, tmp_path, drafter)
    ours = run(described("ours", own, ENGINE, environment=environment), MODEL, asked)
    assert compare(plain, ours) == []
    for wave, answers in zip(asked, ours["waves"], strict=True):
        stats = [answer["vericache"] for answer in answers]
        tokens = sum(len(answer["ids"]) for answer in answers)
        proposed = sum(each["inner_proposed"] for each in stats)
        accepted = sum(each["inner_accepted"] for each in stats)
        assert proposed > 0, wave["kind"]
        assert drafter == "random" or accepted > tokens / 3, wave["kind"]


@pytest.mark.extended
def test_penalties_and_processors_see_no_drafts_that_were_given_up(bound):
    """SGLang counts in every step; requests fall back before any verification."""
    asked, plain = bound
    settings = {**SETTINGS, "draft_length": 32, "residency": "device"}
    restless = faulty("restless")
    ours = run(described("ours", settings, ENGINE, environment=restless), MODEL, asked)
    assert compare(plain, ours) == []
    stats = [answer["vericache"] for wave in ours["waves"] for answer in wave]
    assert any(each["kv_moves"].get("fall_back", 0) > each["cycles"] for each in stats)


@pytest.fixture(scope="module")
def without_determinism(waves):
    """Return what a server answers where SGLang drops seeds: by rejection sampling.

    The waves are of one prompt without seeds.
    """
    free = next(wave for wave in waves if wave["kind"] == "no seed")
    same = {
        **free,
        "prompts": [free["prompts"][0]] * 6,
        "params": [free["params"][0]] * 6,
        "more": {"return_logprob": True},
    }
    cut = {**same, "params": [{**each, "top_p": 0.95} for each in same["params"]]}
    settings = {**SETTINGS, "residency": "device", "acceptance": "rejection"}
    engine = {"max_total_tokens": ENGINE["max_total_tokens"]}
    return run(described("rejection", settings, engine), MODEL, [same, cut])


@pytest.mark.extended
def test_without_a_seed_answers_differ(without_determinism):
    for wave in without_determinism["waves"]:
        assert len({tuple(answer["ids"]) for answer in wave}) >= 4
        for answer in wave:
            values = [entry[0] for entry in answer["output_token_logprobs"]]
            assert len(values) == len(answer["ids"]) == 20
            assert all(value <= 0 for value in values)
    assert without_determinism["state"]["accepted"] > 100


@pytest.mark.extended
def test_the_other_grammar_backend_gives_its_own_tokens(waves):
    """Llguidance keeps the end of a text apart from its own state."""
    grammars = [
        wave for wave in waves if wave["kind"] in ("regex", "JSON schema", "EBNF")
    ]
    engine = {**ENGINE, "grammar_backend": "llguidance"}
    settings = {**SETTINGS, "residency": "device"}
    wanted = run(described("plain", None, engine), MODEL, grammars)
    got = run(described("ours", settings, engine), MODEL, grammars)
    assert compare(wanted, got) == []
    assert got["state"]["accepted"] > 50
