"""Every injected fault is caught, and by the check that is meant to catch it.

This is the test of the tests: were ``compare`` blind, or the ledger asleep, a broken
server would pass the lossless matrix.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from lossless import runs
from lossless.matrix import PLAIN, system
from lossless.prompts import load_tokenizer, record_prompts
from lossless.requests import greedy
from lossless.warm import run

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


def run_with(fault, waves, **settings):
    healthy = system(fault, **{"draft_length": 8, "keep": 0.25, **settings})
    return run(replace(healthy, environment=runs.faulty(fault)), MODEL, waves)


@pytest.mark.parametrize(
    "fault", ["half_complement", "unverified_drafts", "early_arrival"]
)
def test_wrong_tokens_are_seen_by_the_comparison(fault, waves, plain):
    mismatches = runs.compare(plain, run_with(fault, waves))
    assert mismatches
    assert all(mismatch.position >= 0 for mismatch in mismatches)


def test_planes_joined_wrongly_are_seen_by_the_comparison(waves, plain):
    assert runs.compare(plain, run_with("wrong_join", waves, compressor=PLANES))


@pytest.mark.parametrize("compressor", ["keynorm", PLANES])
def test_a_flipped_bit_is_seen_by_the_checksum(compressor, waves, plain):
    ours = run_with("flipped_bit", waves, compressor=compressor)
    assert ours["state"]["failed_reloads"] >= 2 * len(waves[0]["prompts"])
    assert ours["state"]["reprefills"] == len(waves[0]["prompts"])
    assert ours["state"]["rounds"] == 0, "a damaged complement was used"
    assert runs.compare(plain, ours) == [], "a wrong token"


def test_damage_found_while_a_verification_runs_throws_it_away(waves, plain):
    """The link is so slow that verifications start before the last layer is here."""
    ours = run_with("damaged_while_verified", waves, link_gbps=0.05)
    state = ours["state"]
    assert state["early_verifications"] > state["thrown_verifications"] > 0
    assert state["failed_reloads"] >= state["thrown_verifications"]
    assert state["reprefills"] == 0, "the next copy was whole"
    assert runs.compare(plain, ours) == []


def test_a_failed_copy_is_made_again(waves, plain):
    ours = run_with("failing_copies", waves)
    assert ours["state"]["failed_reloads"] > 5
    assert ours["state"]["reprefills"] == 0, "a second try was enough"
    assert ours["state"]["rounds"] > 20
    assert runs.compare(plain, ours) == []


def test_a_leaked_complement_is_seen_by_the_ledger(waves):
    with pytest.raises(runs.RunError, match="held by dead requests"):
        run_with("leaked_complement", waves)
