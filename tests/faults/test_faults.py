"""Every injected fault is caught, and by the check that is meant to catch it.

This is the test of the tests: were ``compare`` blind, or the ledger asleep, a broken
server would pass the lossless matrix.
"""

import json
from pathlib import Path

import pytest
from live_server import faulty, run

from vericache_sglang.evaluation.lossless import compare, greedy
from vericache_sglang.evaluation.matrix import PLAIN, system
from vericache_sglang.evaluation.server import ServerError
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
PLANES = "split-planes:exponent_bits=3,mantissa_bits=1"

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def waves():
    prompts = record_prompts(load_tokenizer(MODEL), [400, 900, 1500, 700], 3)
    return [{"prompts": prompts, "params": [greedy(60, ignore_eos=True)] * 4}]


@pytest.fixture(scope="module")
def plain(waves):
    return run(PLAIN, MODEL, waves)


def extended(*values):
    return pytest.param(*values, marks=pytest.mark.extended)


def run_with(fault, waves, **settings):
    settings = {"draft_length": 8, "keep": 0.25, **settings}
    return run(system(fault, environment=faulty(fault), **settings), MODEL, waves)


@pytest.mark.parametrize(
    "fault",
    ["half_residual", extended("unverified_drafts"), extended("early_arrival")],
)
def test_wrong_tokens_are_seen_by_the_comparison(fault, waves, plain):
    mismatches = compare(plain, run_with(fault, waves))
    assert mismatches
    assert all(mismatch.position >= 0 for mismatch in mismatches)


@pytest.mark.extended
def test_planes_joined_wrongly_are_seen_by_the_comparison(waves, plain):
    assert compare(plain, run_with("wrong_join", waves, compressor=PLANES))


@pytest.mark.parametrize("compressor", ["keynorm", extended(PLANES)])
def test_a_flipped_bit_is_seen_by_the_checksum(compressor, waves, plain):
    ours = run_with("flipped_bit", waves, compressor=compressor)
    assert ours["state"]["failed_prefetches"] >= 2 * len(waves[0]["prompts"])
    assert ours["state"]["reprefills"] == len(waves[0]["prompts"])
    assert ours["state"]["cycles"] == 0, "a damaged complement was used"
    assert compare(plain, ours) == [], "a wrong token"


def test_a_failed_copy_is_made_again(waves, plain):
    ours = run_with("failing_copies", waves)
    assert ours["state"]["failed_prefetches"] > 5
    assert ours["state"]["reprefills"] == 0, "a second try was enough"
    assert ours["state"]["cycles"] > 20
    assert compare(plain, ours) == []


@pytest.mark.extended
@pytest.mark.parametrize("compressor", ["keynorm", PLANES])
def test_a_copy_to_the_host_that_fails_ends_nothing(compressor, waves, plain):
    ours = run_with("failing_saves", waves, compressor=compressor, residency="host")
    assert ours["state"]["cycles"] > 0, "a later copy was made"
    assert compare(plain, ours) == []


@pytest.mark.parametrize(
    ("call", "how"),
    [
        ("scores", "raise"),
        extended("keep_share", "nan"),
        extended("scores", "exit"),
        *(extended(call, "raise") for call in ("update", "open")),
    ],
)
def test_a_faulty_selector_costs_its_requests_their_drafts(call, how, waves, plain):
    method = "test-faulty-share" if call == "keep_share" else "test-faulty"
    line = f"{method}:call={call},how={how}"
    ours = run(system(line, compressor=line, draft_length=8), MODEL, waves)
    state = ours["state"]
    assert state["compressor_failures"] == len(waves[0]["prompts"])
    assert state[f"compressor_errors_{call}"] >= state["compressor_failures"]
    assert state["cycles"] == 0, "it was verified"
    assert compare(plain, ours) == []


@pytest.mark.extended
@pytest.mark.parametrize("call", ["encode_draft", "decode"])
def test_a_faulty_codec_costs_its_requests_their_drafts(call, waves, plain):
    line = f"test-faulty-codec:call={call}"
    ours = run(system(line, compressor=line, draft_length=8), MODEL, waves)
    state = ours["state"]
    assert state[f"compressor_errors_{call}"] > 0
    assert (state["cycles"] > 0) is (call == "decode"), "zeros are drafted from"
    assert compare(plain, ours) == []


@pytest.mark.extended
def test_a_full_disk_costs_the_store_and_no_answer(waves, plain, tmp_path):
    where = json.dumps({"directory": str(tmp_path / "store")})
    engine = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": where,
    }
    ours = run_with("full_disk", waves * 2, engine=engine)
    assert compare(plain, {**ours, "waves": ours["waves"][:1]}) == []
    assert ours["waves"][1][0]["ids"] == ours["waves"][0][0]["ids"]
    state = ours["state"]
    assert state["cycles"] > 0
    assert state["cache_store_failed_calls"] > 0
    assert state["cache_store_written_bytes"] == 0
    assert not list((tmp_path / "store").iterdir()), "something is left behind"


@pytest.mark.extended
def test_a_leaked_residual_is_seen_by_the_ledger(waves):
    with pytest.raises(ServerError, match="held by dead requests"):
        run_with("leaked_residual", waves)
