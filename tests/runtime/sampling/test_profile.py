"""What a request's sampling parameters say about how its tokens are chosen."""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.sampling.sampling_params import SamplingParams

from vericache_sglang.sampling import profile
from vericache_sglang.sampling.profile import (
    DEFAULT_SEED,
    GREEDY_FAST,
    Profile,
    SamplingRule,
    penalised,
    profile_of,
    rolls_back,
)

pytestmark = pytest.mark.sglang


def request(*, grammar=None, processor=None, logprob=False, **params):
    return SimpleNamespace(
        sampling_params=SamplingParams(**params),
        grammar=grammar,
        custom_logit_processor=processor,
        return_logprob=logprob,
    )


def read(req, *, deterministic=False, rejection=False):
    return profile_of(req, deterministic=deterministic, rejection=rejection)


def test_plain_greedy_is_a_bare_argmax():
    assert read(request(temperature=0.0)) == GREEDY_FAST
    assert read(request(temperature=0.9, top_k=1)) == GREEDY_FAST
    assert (
        read(request(temperature=0.0, sampling_seed=3), deterministic=True)
        == GREEDY_FAST
    )


@pytest.mark.parametrize(
    "more",
    [
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 1},
        {"logit_bias": {"3": 1.0}},
        {"grammar": object()},
        {"processor": "{}"},
        {"logprob": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_greedy_with_anything_else_goes_through_the_sampler(more):
    assert read(request(temperature=0.0, **more)) == Profile(SamplingRule.GREEDY)


def test_seeds_count_where_sglang_keeps_them():
    seeded = request(temperature=0.8, sampling_seed=2**40 + 7)
    assert read(seeded, deterministic=True) == Profile(
        SamplingRule.SEEDED, seed=2**40 + 7
    )
    assert read(seeded, deterministic=True, rejection=True).rule is SamplingRule.SEEDED
    unseeded = read(request(temperature=0.8), deterministic=True)
    assert unseeded == Profile(SamplingRule.SEEDED, seed=DEFAULT_SEED)


def test_a_seed_sglang_drops_still_couples():
    seeded = request(temperature=0.8, sampling_seed=11)
    for rejection in (False, True):
        got = read(seeded, rejection=rejection)
        assert got == Profile(SamplingRule.COUPLED, seed=11)


def test_without_a_seed_every_request_has_noise_of_its_own(monkeypatch):
    monkeypatch.setattr(profile, "_SYSTEM_RANDOM", random.Random(1))
    drawn = [read(request(temperature=0.8)) for _ in range(50)]
    assert {each.rule for each in drawn} == {SamplingRule.COUPLED}
    assert len({each.seed for each in drawn}) == 50
    assert all(0 <= each.seed < 2**63 for each in drawn), "fits an int64"
    assert read(request(temperature=0.8), rejection=True).rule is SamplingRule.REJECTION


@pytest.mark.parametrize(
    ("params", "filtered"),
    [
        ({}, False),
        ({"top_k": -1}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
    ],
)
def test_filtered_says_whether_a_cut_is_asked_for(params, filtered):
    assert read(request(temperature=0.8, **params)).filtered is filtered


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, False),
        ({"repetition_penalty": 1.0}, False),
        ({"repetition_penalty": 0.9}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"presence_penalty": 0.5}, True),
        ({"min_new_tokens": 2}, True),
        ({"logit_bias": {"1": 1.0}}, False),
    ],
)
def test_penalised(params, wanted):
    assert penalised(SamplingParams(**params)) is wanted


class Forward(BaseGrammarObject):
    """A grammar that cannot go back, as ``outlines``."""


class Both(BaseGrammarObject):
    def rollback(self, k):
        """Go back."""


def test_a_grammar_rolls_back_if_it_says_how():
    assert rolls_back(None)
    assert rolls_back(Both())
    assert not rolls_back(Forward())


@pytest.mark.parametrize(("inner", "wanted"), [(Both, True), (Forward, False)])
def test_a_reasoners_grammar_is_as_good_as_the_one_inside(inner, wanted):
    from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject

    assert rolls_back(ReasonerGrammarObject(inner(), [5])) is wanted
