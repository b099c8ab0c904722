"""Shares of a drafter's paths by the program, on what its servers were measured."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.scheduling.iteration_model import Coefficients
from vericache_sglang.scheduling.path_mix import RECENT, UNMEASURED, PathMix, Speeds
from vericache_sglang.scheduling.paths import Path

READ_S = 1e-6
SERVER = Speeds(
    instances=1,
    slots=1e9,
    iteration=Coefficients(
        base_s=0.0, per_token_s=0.0, per_read_s=READ_S, per_product_s=0.0
    ),
    prompt_s=0.0,
    load_s=0.0,
)
"""A row takes as long as its reads; everything else is free."""
PROMPT, OUTPUT = 950, 100
ROW_S = READ_S * (PROMPT + OUTPUT / 2)


def mix_of(near=(SERVER,), far=SERVER, *, drafts=10, tokens=10, part=0.25, lead=0):
    """Return the mix of a drafter that has seen one request, all of whose drafts agree.

    Args:
        drafts: Of a cycle.
        tokens: Of its verdict.
        part: Draft KV over full KV.
        lead: Tokens of a request before it drafts.
    """
    mix = PathMix(draft_length=4, acceptance=0.9, compressed=0.5)
    mix.note_request(PROMPT, OUTPUT, 0.0)
    mix.note_cycle(drafts, tokens)
    mix.note_drafting(lead, part)
    mix.review(near, far)
    return mix


def shares(mix):
    return [mix.shares.get(path, 0.0) for path in (Path.B1, Path.B2, Path.P1_CACHED)]


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        # In rows: B1 100 near, B2 100 far; P1 10 near and 25 far, the drafts 1/4 each.
        ({}, (0.6 / 100, 0, 1 / 25)),
        ({"near": (SERVER, SERVER)}, (1.6 / 100, 0, 1 / 25)),
        # 20 tokens decoded before; of the others twice as many drafts are made.
        (
            {"tokens": 5, "lead": 20},
            (max(0.0, 1 - (20 + 16) / 40) / 100, 0, min(1 / 36, 1 / 40)),
        ),
        # The drafts read it all: nothing is gained over B1 and B2.
        ({"part": 1.0, "tokens": 1}, (1 / 100, 1 / 100, 0)),
    ],
    ids=["all agree", "two verifiers", "half agree", "no compression"],
)
def test_shares_by_hand(given, rates):
    total = sum(rates)
    expected = [rate / total for rate in rates]
    assert shares(mix_of(**given)) == pytest.approx(expected, abs=1e-6)


def test_the_link_bounds_what_drafters_read():
    # A second for full KV: no more B2 than that, beside 10 B1 a second.
    slow = replace(SERVER, load_s=1 / PROMPT)
    near_rate = 1 / (OUTPUT * ROW_S)
    found = shares(mix_of(far=slow, part=1.0, tokens=1))
    assert found == pytest.approx([near_rate / (near_rate + 1), 1 / (near_rate + 1), 0])


def test_a_prefill_counts_where_it_is_made():
    # As long as the answer, measured at the verifier alone.
    near = replace(SERVER, prompt_s=OUTPUT * ROW_S / PROMPT)
    b1, b2, _ = shares(mix_of(near=(near,), part=1.0, tokens=1))
    assert b1 == pytest.approx(b2)
    far = replace(SERVER, prompt_s=1e-9)
    b1, b2, _ = shares(mix_of(near=(near,), far=far, part=1.0, tokens=1))
    assert b2 == pytest.approx(2 * b1, rel=1e-2)


@given(
    near=st.integers(0, 3),
    base=st.floats(0, 0.1),
    link=st.floats(0, 1e-2),
    slots=st.floats(1, 1e6),
    part=st.floats(0.01, 1),
    tokens=st.integers(1, 10),
)
def test_whatever_was_measured_shares_are_of_requests(
    near, base, link, slots, part, tokens
):
    model = replace(SERVER.iteration, base_s=base, per_product_s=READ_S / 7)
    server = replace(SERVER, iteration=model, slots=slots, load_s=link)
    mix = mix_of((server,) * near, server, part=part, tokens=tokens)
    assert sum(mix.shares.values()) == pytest.approx(1)
    assert min(mix.shares.values()) >= 0
    assert near or mix.shares == UNMEASURED


def test_answers_are_expected_to_be_as_long_as_those_before():
    assert PathMix(4, 0.9, 0.5).answer(4096) == 4096
    assert mix_of().answer(4096) == OUTPUT
    assert mix_of().answer(7) == 7


def test_before_all_was_measured_requests_begin_at_verifiers():
    mix = PathMix(draft_length=4, acceptance=0.9, compressed=0.5)
    for near, far in (((SERVER,), SERVER), ((), SERVER)):
        mix.review(near, far)
        assert mix.shares == UNMEASURED, "no request has ended"
        mix.note_request(PROMPT, 0, 0.0)  # aborted
    mix.note_request(PROMPT, OUTPUT, 0.0)
    mix.review((SERVER,), replace(SERVER, load_s=inf))
    assert mix.shares == UNMEASURED, "the link"
    assert mix.load(1.0) == 1.0


@pytest.mark.parametrize("part", [0.1, 0.5, 1.0, 3.0])
def test_the_load_is_a_part_of_what_can_be_served(part):
    mix = mix_of()
    served = (0.6 / 100 + 1 / 25) / ROW_S  # requests per second
    every = 1 / (part * served)
    for i in range(RECENT + 1):
        mix.note_request(PROMPT, OUTPUT, i * every)
    assert mix.load((RECENT + 1) * every) == pytest.approx(min(part, 1.0), rel=1e-3)
    assert mix.load(1e9) < 1e-3, "long ago"
