"""Servers that break the promise: on request only, and they say so."""

import itertools
import os
import random
import statistics
import subprocess
import sys
from importlib.metadata import entry_points
from itertools import takewhile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_kernels.token_commit import EMIT, DraftTokenRows, DraftTokens
from vericache_sglang.drafters.base import Wanted
from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation import altered, dice

TOKENS = st.lists(st.integers(0, 9), max_size=8)


def test_no_server_can_be_altered_by_accident():
    """Nothing that is installed leads to it, only a benchmark's own folder."""
    installed = entry_points(group="sglang.srt.plugins")
    assert not [entry for entry in installed if "altered" in entry.value]
    assert altered.ENV not in os.environ


@pytest.mark.parametrize("value", [None, "", "on", "accept"])
def test_an_alteration_that_is_not_named_is_refused(monkeypatch, value):
    monkeypatch.delenv(altered.ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(altered.ENV, value)
    with pytest.raises(ConfigError, match=altered.ENV):
        altered.install()


def test_the_environment_leads_to_it(tmp_path):
    found = altered.environment(tmp_path, altered.LOSSY)
    assert found[altered.ENV] == "lossy"
    code = (
        "from importlib.metadata import entry_points as e;"
        "print([x.value for x in e(group='sglang.srt.plugins')])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **found},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "'vericache_sglang.evaluation.altered:install'" in printed


@given(TOKENS, st.data(), st.floats(0, 1), st.integers(0, 99))
def test_dice_accept_a_beginning_of_the_drafts(drafts, data, p, seed):
    count = data.draw(st.integers(1, len(drafts) + 1))
    target = data.draw(st.lists(st.integers(20, 29), min_size=count, max_size=count))
    run = dice.simulated_acceptance(p, random.Random(seed))(drafts, target)
    accepted = list(takewhile(lambda token: token < 20, run))
    assert run == [*drafts[: len(accepted)], target[len(accepted)]]


def test_dice_are_fair():
    rule = dice.simulated_acceptance(0.9, random.Random(1))
    drafts, target = [1] * 32, [2] * 33
    runs = [len(rule(drafts, target)) - 1 for _ in range(4000)]
    wanted = sum(0.9**k for k in range(1, 33))  # 8.69
    assert statistics.fmean(runs) == pytest.approx(wanted, rel=0.05)
    assert dice.simulated_acceptance(1.0, random.Random(1))(drafts, target) == [
        *drafts,
        2,
    ]
    assert dice.simulated_acceptance(0.0, random.Random(1))(drafts, target) == [2]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.data())
def test_dice_on_draft_tokens_accept_a_beginning_of_the_drafts(drafted, data):
    p = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    pool_indices = data.draw(st.permutations(range(8)))[: len(drafted)]
    tokens = torch.arange(64).reshape(8, 8)
    before, draft_tokens = (
        tokens.clone(),
        DraftTokens(tokens, torch.zeros(8, dtype=torch.int32), torch.zeros(8).long()),
    )
    first = torch.tensor([0, *itertools.accumulate(n + 1 for n in drafted)])
    kind = torch.full((len(drafted),), EMIT)
    target = before[0, :1].new_tensor(range(100, 100 + int(first[-1])))
    # Even where the full KV agrees, the dice decide.
    target[0 : drafted[0]] = before[pool_indices[0], 1 : 1 + drafted[0]]
    rows = DraftTokenRows(torch.tensor(pool_indices), first, kind)
    out = dice.in_buffer(p, 3)(draft_tokens, rows, target)
    for i, (pool_idx, n) in enumerate(zip(pool_indices, drafted, strict=True)):
        count = int(out.counts[i])
        assert 1 <= count <= n + 1
        assert p or count == 1
        assert p < 1 or count == n + 1
        run = out.tokens[i, :count].tolist()
        assert run[:-1] == before[pool_idx, 1:count].tolist()
        assert run[-1] == target[first[i] + count - 1]
        assert draft_tokens.tokens[pool_idx, 0] == run[-1]


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_a_probability_is_one(p):
    with pytest.raises(ConfigError, match="--simulated-acceptance"):
        altered.simulated(p)


def test_guesses_are_token_ids_for_every_row():
    rows = torch.tensor([3, 1])
    wanted = Wanted(rows, torch.tensor([9, 5]), torch.tensor([1, 0]), 300, (), ())
    guesses = dice.RandomDrafter(16).propose(wanted)
    assert guesses.shape == (2, 300)
    assert set(guesses.flatten().tolist()) == set(range(16))
