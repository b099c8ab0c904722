"""The promise under every compressor: plain SGLang's tokens, wherever the KV is."""

from pathlib import Path

import pytest

from lossless.matrix import METHODS, PLACES, PLAIN, methods, system
from lossless.prompts import code_prompts, load_tokenizer, record_prompts
from lossless.requests import greedy
from lossless.runs import compare, faulty
from lossless.warm import run
from vericache_sglang.compression.base import SELECTORS
from vericache_sglang.compression.catalog import CODECS

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
HELD = ("kept_slots", "staging_slots", "host_bytes", "query_tails", "running")

NONSENSE = ("random", "test-nan+test-nonsense", "test-nonsense")
"""Of these nobody expects that drafts are accepted."""

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def waves():
    """Return two waves: all lengths at once, then cached prefixes going on.

    Packed tokens come in segments of 512: prompts have none, one, and several.
    """
    tokenizer = load_tokenizer(MODEL)
    texts = record_prompts(tokenizer, [250, 700, 1400, 2300], 17)
    texts += code_prompts(tokenizer, [600], 17)
    longer = [*texts[:3], texts[2] + texts[1], texts[4]]
    return [
        {"prompts": texts, "params": [greedy(40, ignore_eos=True)] * len(texts)},
        {"prompts": longer, "params": [greedy(16, ignore_eos=True)] * len(longer)},
    ]


@pytest.fixture(scope="module")
def plain(waves):
    return run(PLAIN, MODEL, waves)


@pytest.mark.parametrize(
    "system",
    [methods(i % len(PLACES))[i] for i in range(len(METHODS))],
    ids=lambda system: system.name,
)
def test_tokens_are_identical(system, waves, plain):
    """Every method once, the places by turns; ``check_lossless.py`` runs all pairs."""
    ours = run(system, MODEL, waves)
    assert compare(plain, ours) == []
    state = ours["state"]
    assert state["rounds"] >= 10, "nothing was verified: this run proves nothing"
    assert state["splits"] >= 8
    if system.settings["compressor"] not in NONSENSE:
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
    moves = {name: state[name] for name in ("splits", "unsplits", "offloads", "pins")}
    assert all(moves.values()), moves
    # Where reloads are quick nobody waits long enough to be parked.
    assert state["parks"] == state["resumes"]
    assert state["parks"] > 0 or compressor == "kivi:bits=4"
    assert {name: state[name] for name in HELD} == dict.fromkeys(HELD, 0)
