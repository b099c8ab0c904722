"""Sampled output is distributed as the full KV's, however bad the drafts are.

Pairs of neighbouring tokens are counted and compared with the exact distribution by a
chi-square test, and the same test finds drafts that were not verified.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("sglang")
pytest.importorskip("scipy")

from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from toy_sampler import (
    DRAFTS,
    Toy,
    exact,
    fixed_noise,
    logits,
    probability,
)

from vericache_sglang.evaluation.distribution import PARAMS
from vericache_sglang.sampling.rejection import filtered_probs

pytestmark = pytest.mark.sglang

FULL, BAD = logits(1), logits(2)
BOTH_RULES = pytest.mark.parametrize(
    "rejection", [False, True], ids=["coupled", "rejection"]
)


@pytest.fixture(autouse=True)
def _noise():
    with fixed_noise(17):
        yield


def kinds():
    """Yield (kind, rule); the slow rule by default for the plainest alone."""
    for kind in PARAMS:
        yield pytest.param(kind, False, id=f"{kind}-coupled")
        marks = () if kind == "temperature" else pytest.mark.extended
        yield pytest.param(kind, True, id=f"{kind}-rejection", marks=marks)


@pytest.mark.parametrize(("kind", "rejection"), kinds())
def test_output_is_distributed_as_the_full_kvs(kind, rejection):
    toy = Toy(FULL, BAD, rejection=rejection, count=400, **PARAMS[kind])
    while toy.emitted < 12_000:
        toy.round()
    drafted = toy.rounds * DRAFTS
    assert 0.05 * drafted < toy.accepted < 0.8 * drafted, "drafts of both sorts"
    assert probability(toy.pairs(), exact(FULL, toy.params)) > 0.001


@BOTH_RULES
def test_drafts_that_were_not_verified_are_found(rejection):
    toy = Toy(FULL, BAD, rejection=rejection, count=400, temperature=0.9)
    while toy.emitted < 12_000:
        toy.draft()
        toy.trust()
    assert probability(toy.pairs(), exact(FULL, toy.params)) < 1e-6
    assert probability(toy.pairs(), exact(BAD, toy.params)) > 0.001


def test_one_round_in_ten_that_was_not_verified_is_found():
    toy = Toy(FULL, BAD, rejection=False, count=400, temperature=0.9)
    rounds = 0
    while toy.emitted < 12_000:
        for _ in range(DRAFTS):
            toy.draft()
        if rounds % 10 == 0:
            toy.trust()
        else:
            toy.verify()
        rounds += 1
    assert probability(toy.pairs(), exact(FULL, toy.params)) < 1e-6


def acceptance(toy, rounds):
    for _ in range(rounds):
        toy.round()
    return toy.accepted / (toy.rounds * DRAFTS)


class OtherNoise(Toy):
    """Draws drafts with noise that the verification does not have."""

    def draft(self):
        self._swap()
        super().draft()
        self._swap()

    def _swap(self):
        for state in self.states:
            state.profile = replace(state.profile, seed=state.profile.seed ^ 1)


def test_shared_noise_accepts_more_than_independent_draws():
    """Close distributions: the draft part is the full KV and a little noise."""
    near = FULL + 0.1 * logits(3)
    shared, independent = (
        acceptance(kind(FULL, near, rejection=False, count=200, temperature=1.0), 8)
        for kind in (Toy, OtherNoise)
    )
    assert shared > 0.8
    assert shared > independent + 0.2


@BOTH_RULES
def test_drafts_of_the_full_kv_itself_are_all_accepted(rejection):
    toy = Toy(FULL, FULL, rejection=rejection, count=100, **PARAMS["all"])
    assert acceptance(toy, 5) == 1.0


def test_coupled_output_does_not_depend_on_the_drafts():
    """The noise of a position is the request's, so bad drafts only cost rounds."""
    texts = []
    for drafter in (FULL, BAD):
        with fixed_noise(9):
            toy = Toy(FULL, drafter, rejection=False, count=50, **PARAMS["all"])
            for _ in range(12):
                toy.round()
        texts.append([tuple(state.outputs[:13]) for state in toy.states])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 25


def test_filters_are_sglangs():
    random = torch.Generator().manual_seed(3)
    probs = torch.softmax(3 * torch.randn(40, 30, generator=random), dim=-1)
    ks = torch.randint(1, 40, (40,), generator=random)
    ps, least = torch.rand(2, 40, generator=random)
    given = (probs, ks, ps, least * (torch.arange(40) % 2))
    _, kept, tokens, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        *given, True, None, None, return_filtered_probs=True
    )
    whole = torch.zeros_like(probs).scatter_(-1, tokens.to(torch.int64), kept)
    assert torch.equal(filtered_probs(*given), whole / whole.sum(-1, keepdim=True))


def test_rejection_keeps_what_drafts_were_drawn_from_until_they_are_verified():
    toy = Toy(FULL, BAD, rejection=True, count=4, temperature=1.0)
    toy.draft()
    toy.draft()
    assert [len(state.drafted_from) for state in toy.states] == [2] * 4
    for state in toy.states:
        wanted = exact(BAD, toy.params)[[state.pending, state.drafts[0]]]
        got = torch.stack(state.drafted_from).double()
        assert torch.allclose(got, wanted, atol=1e-6)
    toy.verify()
    assert [state.drafted_from for state in toy.states] == [[]] * 4
