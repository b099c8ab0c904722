"""What a request's next token depends on beside its logits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.sampling.sampling_params import TOP_K_ALL

DEFAULT_SEED = 42
"""SGLang's seed of a request without one (``from_schedule_batch``)."""

_SYSTEM_RANDOM = random.SystemRandom()


class SamplingRule(Enum):
    """How a request's next token is chosen from its logits.

    GREEDY: their argmax. SEEDED: by SGLang's sampler with the request's seed. COUPLED:
    with noise of its own, the same for draft and target. REJECTION: drawn anew by draft
    and target, and verified by rejection sampling.
    """

    GREEDY = "greedy"
    SEEDED = "seeded"
    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class Profile:
    """How a request's next token follows from its logits.

    Attributes:
        rule: Argmax, or which noise.
        greedy_fast: It is the argmax of the logits as they are, and nothing but the
            token is asked for.
        filtered: Top-k, top-p or min-p cut the distribution first.
        seed: Key of the request's noise, 64 bits.
    """

    rule: SamplingRule
    greedy_fast: bool = False
    filtered: bool = False
    seed: int = 0


GREEDY_FAST = Profile(SamplingRule.GREEDY, greedy_fast=True)


def profile_of(req: Any, *, deterministic: bool, rejection: bool) -> Profile:
    """Read a request's profile.

    A request has noise of its own even where SGLang gives it none: only then do the
    draft part and the full KV draw alike.

    Args:
        req: SGLang's ``Req``.
        deterministic: SGLang runs with ``--enable-deterministic-inference``; it keeps
            seeds only then, and every request has one.
        rejection: The server's rule for requests without a seed.
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
    """Say whether earlier output tokens change a request's logits."""
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty not in (None, 1.0)
        or params.min_new_tokens
    )


def rolls_back(grammar: Any) -> bool:
    """Say whether a grammar can give up rejected drafts; None can.

    ``outlines`` cannot; a reasoner's grammar can if the one inside it can.
    """
    if grammar is None:
        return True
    inner = getattr(grammar, "grammar", None)
    if inner is not None:
        return rolls_back(inner)
    return type(grammar).rollback is not BaseGrammarObject.rollback


def looks_at_tokens(req: Any) -> bool:
    """Say whether the host has to know a token before the next one can be chosen.

    Log-probabilities are laid out on the host too, beside the tokens they belong to.
    """
    return bool(
        penalised(req.sampling_params)
        or req.grammar is not None
        or req.custom_logit_processor is not None
        or req.return_logprob
    )


def _needs_sampling(req: Any) -> bool:
    return looks_at_tokens(req) or req.sampling_params.logit_bias is not None
