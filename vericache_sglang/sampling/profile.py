"""Sampling profile of a request: rule, filters and seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.sampling.sampling_params import TOP_K_ALL

DEFAULT_SEED = 42
"""SGLang's default seed (``from_schedule_batch``)."""

_SYSTEM_RANDOM = random.SystemRandom()


class SamplingRule(Enum):
    """How a request's next token is chosen from its logits.

    GREEDY: argmax. SEEDED: SGLang's sampler with the request's seed. COUPLED: noise
    drawn per request, the same for draft and target. REJECTION: independent draws,
    verified by rejection sampling.
    """

    GREEDY = "greedy"
    SEEDED = "seeded"
    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class Profile:
    """Sampling profile of a request.

    Attributes:
        rule: Sampling rule.
        greedy_fast: Greedy fast path: the argmax of the unmodified logits, with no
            log-probabilities requested.
        filtered: Top-k, top-p or min-p filter the distribution first.
        seed: Key of the request's noise, 64 bits.
    """

    rule: SamplingRule
    greedy_fast: bool = False
    filtered: bool = False
    seed: int = 0


GREEDY_FAST = Profile(SamplingRule.GREEDY, greedy_fast=True)


def profile_of(req: Any, *, deterministic: bool, rejection: bool) -> Profile:
    """Return a request's sampling profile.

    Requests without a seed get a noise key of their own, so that draft KV and full KV
    sample with the same noise.

    Args:
        req: SGLang's ``Req``.
        deterministic: SGLang runs with ``--enable-deterministic-inference``; only then
            does it keep seeds, and every request has one.
        rejection: Use rejection sampling for requests without a seed.
    """
    params = req.sampling_params
    if params.top_k <= 1:  # SGLang spells temperature 0 as top_k 1
        return Profile(SamplingRule.GREEDY) if _needs_sampling(req) else GREEDY_FAST
    seed = params.sampling_seed
    rule = SamplingRule.SEEDED if deterministic else SamplingRule.COUPLED
    if seed is None and deterministic:
        seed = DEFAULT_SEED
    elif seed is None:
        seed = _SYSTEM_RANDOM.getrandbits(63)
        rule = SamplingRule.REJECTION if rejection else rule
    filtered = params.top_k != TOP_K_ALL or params.top_p != 1.0 or params.min_p > 0
    return Profile(rule, filtered=filtered, seed=seed)


def penalised(params: Any) -> bool:
    """Return whether earlier output tokens change a request's logits."""
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty not in (None, 1.0)
        or params.min_new_tokens
    )


def rolls_back(grammar: Any) -> bool:
    """Return whether a grammar supports rollback; True for None.

    ``outlines`` does not; a reasoner grammar does if the one it wraps does.
    """
    if grammar is None:
        return True
    inner = getattr(grammar, "grammar", None)
    if inner is not None:
        return rolls_back(inner)
    return type(grammar).rollback is not BaseGrammarObject.rollback


def depends_on_tokens(req: Any) -> bool:
    """Return whether the host must know a token before the next one can be sampled."""
    return bool(
        penalised(req.sampling_params)
        or req.grammar is not None
        or req.custom_logit_processor is not None
    )


def looks_at_tokens(req: Any) -> bool:
    """Return whether results of a request are assembled on the host, token by token.

    Those with log-probabilities are, as those that depend on tokens.
    """
    return depends_on_tokens(req) or bool(req.return_logprob)


def _needs_sampling(req: Any) -> bool:
    return looks_at_tokens(req) or req.sampling_params.logit_bias is not None
