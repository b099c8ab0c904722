"""KL divergence of a lossy server's next-token distributions from the full KV's."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEAST = 1e-9
"""Lower bound of the probability outside the lists, to keep logarithms finite."""

SMALLEST = 1e-38
"""About the smallest float32: a listed probability that underflowed is below it."""

Position = list[list[Any]]
"""SGLang's ``output_top_logprobs`` of one token: [log-probability, id, text] each."""


def top_k_divergence(full: Mapping[int, float], lossy: Mapping[int, float]) -> float:
    """Return a lower bound of KL(full || lossy), in nats.

    Tokens that are on both lists are outcomes of their own, all others are one
    outcome: merging outcomes never raises a KL divergence.

    Args:
        full: Token id -> log-probability of the most probable tokens, full KV.
        lossy: The same of the lossy server.
    """
    shared = full.keys() & lossy.keys()
    p = [math.exp(full[token]) for token in shared]
    q = [max(SMALLEST, math.exp(lossy[token])) for token in shared]
    p.append(max(LEAST, 1.0 - sum(p)))
    q.append(max(LEAST, 1.0 - sum(q)))
    terms = (a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    return max(0.0, sum(terms))


def divergence(
    full: Sequence[Sequence[Position]], lossy: Sequence[Sequence[Position]]
) -> dict[str, Any]:
    """Compare answers position by position; both hold the same tokens.

    An answer's first token is left out: the prompt's own forward chose it.

    Args:
        full: Per request and output token, the full KV's most probable tokens.
        lossy: The same of the lossy server, which was made to emit the same tokens.

    Returns:
        ``nats_per_token`` and ``max_nats``, ``nats_per_request``, ``same_argmax``
        (share of positions) and ``positions``.
    """
    nats: list[list[float]] = []
    same = 0
    for wanted, got in zip(full, lossy, strict=True):
        pairs = list(zip(wanted[1:], got[1:], strict=True))
        nats.append([top_k_divergence(by_id(a), by_id(b)) for a, b in pairs])
        same += sum(_first(a) == _first(b) for a, b in pairs)
    every = [value for values in nats for value in values]
    if not every:
        return {"positions": 0}
    return {
        "nats_per_token": statistics.fmean(every),
        "max_nats": max(every),
        "nats_per_request": statistics.fmean(sum(values) for values in nats),
        "same_argmax": same / len(every),
        "positions": len(every),
    }


def by_id(position: Position) -> dict[int, float]:
    """Return token id -> log-probability; JSON has no infinity, so None is one."""
    return {
        token: -math.inf if value is None else value for value, token, *_ in position
    }


def _first(position: Position) -> int:
    best: int = max(position)[1]
    return best
