"""The promise under every compressor: plain SGLang's tokens, wherever the KV is."""

from pathlib import Path

import pytest
from live_server import faulty, run

from vericache_sglang.compression.base import SELECTORS
from vericache_sglang.compression.catalog import CODECS
from vericache_sglang.evaluation.lossless import compare, greedy
from vericache_sglang.evaluation.matrix import METHODS, PLACES, PLAIN, methods, system
from vericache_sglang.evaluation.workload import (
    code_prompts,
    load_tokenizer,
    record_prompts,
)

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
HELD = ("kept_slots", "staging_slots", "host_bytes", "query_tails", "running")

USUAL = (
    "expected-attention",
    "kivi:bits=2",
    "snapkv+split-planes:exponent_bits=3,mantissa_bits=1",
    "test-nonsense",
)
"""One of each family: dropping for all questions, quantizing, split planes in a pair,
a third party's. Dropping for one question is in test_matrix.py."""

ALL = (*METHODS, "test-nan+test-nonsense", "test-nonsense")
"""The last two are a third party's, bad on purpose."""

REPEATED = {
    *("kivi:bits=4", "turboquant:bits=2"),
    "split-planes:exponent_bits=3,mantissa_bits=0",
    *(line for line in METHODS if "kvquant-4bit" in line),
    *(line for line in METHODS if "rotatekv" in line and "bits=3" not in line),
}
"""Other bits of codecs that have a row: ``bench lossless --compressors`` runs them."""

NONSENSE = ("random", "test-nan+test-nonsense", "test-nonsense")
"""Of these nobody expects that drafts are accepted."""

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def waves():
    """Return two waves: all lengths at once, then cached prefixes going on.

    Packed tokens come in segments of 512: prompts have none, one, and several.
    """
    tokenizer = load_tokenizer(MODEL)
    texts = record_prompts(tokenizer, [250, 700, 1300, 1800], 17)
    texts += code_prompts(tokenizer, [600], 17)
    longer = [*texts[:3], texts[2] + texts[1], texts[4]]
    return [
        {"prompts": texts, "params": [greedy(40, ignore_eos=True)] * len(texts)},
        {"prompts": longer, "params": [greedy(16, ignore_eos=True)] * len(longer)},
    ]


@pytest.fixture(scope="module")
def plain(waves):
    return run(PLAIN, MODEL, waves)


def rows():
    """Yield every method once, the places by turns."""
    assert set(USUAL) <= set(ALL)
    for i, method in enumerate(ALL):
        if method in REPEATED:
            continue
        served = methods(i % len(PLACES), ALL)[i]
        marks = () if method in USUAL else pytest.mark.extended
        yield pytest.param(served, id=served.name, marks=marks)


def compressor_of(system):
    return system.flags[system.flags.index("--vericache-compressor") + 1]


@pytest.mark.parametrize("system", rows())
def test_tokens_are_identical(system, waves, plain):
    """``bench lossless --compressors`` runs every method in every place."""
    ours = run(system, MODEL, waves)
    assert compare(plain, ours) == []
    state = ours["state"]
    assert state["cycles"] >= 10, "nothing was verified: this run proves nothing"
    assert state["compressions"] >= 8
    if compressor_of(system) not in NONSENSE:
        assert state["accepted"] > 0.3 * state["drafted"]
    assert {name: state[name] for name in HELD} == dict.fromkeys(HELD, 0)


@pytest.fixture(scope="module")
def long(waves):
    """Return one wave of answers long enough to be moved about."""
    prompts = waves[0]["prompts"]
    return [
        {"prompts": prompts, "params": [greedy(120, ignore_eos=True)] * len(prompts)}
    ]


@pytest.fixture(scope="module")
def long_plain(long):
    return run(PLAIN, MODEL, long)


def test_every_name_has_a_row():
    """What is registered is served here; a new method is one row."""
    ours = {*SELECTORS.names(), *CODECS}
    served = {part.split(":")[0] for line in METHODS for part in line.split("+")}
    assert {name for name in ours if not name.startswith("test-")} <= served


@pytest.mark.extended
@pytest.mark.parametrize(
    ("compressor", "engine"),
    [
        ("split-planes:exponent_bits=3,mantissa_bits=1", {}),
        ("kivi:bits=4", {"page_size": 16}),
        ("snapkv+split-planes", {"disable_radix_cache": True}),
    ],
)
def test_packed_drafts_move_between_residencies(compressor, engine, long, long_plain):
    """Random splits, offloads, pins, parks, resumes and unsplits all along."""
    restless = system(
        f"restless {compressor}",
        compressor=compressor,
        draft_length=8,
        engine=engine,
        environment=faulty("restless"),
    )
    ours = run(restless, MODEL, long)
    assert compare(long_plain, ours) == []
    state = ours["state"]
    moves = ("compressions", "fallbacks", "offloads", "loads", "swap_outs", "swap_ins")
    made = {name: state[name] for name in moves}
    assert all(made.values()), str(made)
    assert state["swap_outs"] == state["swap_ins"]
    assert {name: state[name] for name in HELD} == dict.fromkeys(HELD, 0)
