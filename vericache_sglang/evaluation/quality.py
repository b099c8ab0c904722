"""Task-independent metrics of answers and distributions against the full KV's.

Functional scores belong to the tasks. KL divergence sequences are per decoded token:
the first token of an answer comes from the prefill and is left out.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from vericache_sglang.evaluation.divergence import by_id, top_k_divergence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vericache_sglang.evaluation.divergence import Position

RESAMPLES = 2000
"""Of a bootstrap interval."""

INTERVAL = (2.5, 97.5)
"""Percentiles of a bootstrap interval."""


def step_divergences(
    full: Sequence[Position], other: Sequence[Position]
) -> list[float]:
    """Return KL(full || other) of every decoded token but the first, in nats.

    Exact where the lists hold the whole vocabulary, else a lower bound.

    Args:
        full: Most probable tokens of each position, full KV.
        other: The same of another server after the same tokens; a shorter one compares
            only its own positions.
    """
    pairs = zip(full[1:], other[1:], strict=False)
    return [top_k_divergence(by_id(a), by_id(b)) for a, b in pairs]


def curve(sequences: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return KL_t and KL_1:t by step.

    Args:
        sequences: [n][steps of each] KL divergences after sampled prefixes, in nats.

    Returns:
        For each step the mean over the sequences, an ended one counting as 0 (both
        models have nothing left to differ in), and its running sum: by the chain rule
        the KL divergence of the first t tokens.
    """
    steps = np.zeros((max(1, len(sequences)), max(map(len, sequences), default=0)))
    for row, values in zip(steps, sequences, strict=False):
        row[: len(values)] = values
    means = steps.mean(axis=0)
    return means.tolist(), np.cumsum(means).tolist()


def interval(
    above: Sequence[float], below: Sequence[float] | None = None, seed: int = 0
) -> dict[str, float] | None:
    """Return a ratio of sums with its bootstrap interval over samples.

    Args:
        above: [n] numerators, one for each sample.
        below: [n] denominators >= 0; None: 1 each, so the ratio is the mean.

    Returns:
        ``value``, ``low`` and ``high`` (95 %), ``n``; None where there is nothing.
    """
    tops = np.asarray(above, float)
    bottoms = np.ones_like(tops) if below is None else np.asarray(below, float)
    if not len(tops) or bottoms.sum() <= 0:
        return None
    drawn = np.random.default_rng(seed).integers(0, len(tops), (RESAMPLES, len(tops)))
    wholes = bottoms[drawn].sum(axis=1)
    ratios = tops[drawn].sum(axis=1)[wholes > 0] / wholes[wholes > 0]
    low, high = np.percentile(ratios, INTERVAL)
    value = float(tops.sum() / bottoms.sum())
    return {"value": value, "low": float(low), "high": float(high), "n": len(tops)}


def first_divergence(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the position of the first differing token; None where all are equal."""
    shared = min(len(wanted), len(got))
    at = next((i for i in range(shared) if wanted[i] != got[i]), shared)
    return None if at == len(wanted) == len(got) else at


def token_match(wanted: Sequence[int], got: Sequence[int]) -> float:
    """Return the share of positions with the same token, over the longer answer."""
    longest = max(len(wanted), len(got))
    same = sum(a == b for a, b in zip(wanted, got, strict=False))
    return same / longest if longest else 1.0


def normal_words(text: str) -> list[str]:
    """Return lower-case words without punctuation and articles, as SQuAD's metric."""
    kept = "".join(each for each in text.lower() if each not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def word_f1(answer: str, wanted: str) -> float:
    """Return the F1 of two texts' words, whatever their order, in [0, 1]."""
    got, words = normal_words(answer), normal_words(wanted)
    same = (Counter(got) & Counter(words)).total()
    return _f1(same, len(got), len(words)) if got or words else 1.0


def rouge_l(answer: str, wanted: str) -> float:
    """Return the F1 of two texts' longest common subsequence of words, in [0, 1]."""
    got, words = answer.split(), wanted.split()
    return _f1(_common(got, words), len(got), len(words)) if got or words else 1.0


def _f1(same: int, got: int, wanted: int) -> float:
    return 2 * same / (got + wanted) if same else 0.0


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    ids: dict[str, int] = {}
    left = [ids.setdefault(word, len(ids)) for word in a]
    right: NDArray[Any] = np.array(
        [ids.setdefault(word, len(ids)) for word in b], dtype=int
    )
    row = np.zeros(len(right) + 1, dtype=int)
    for word in left:
        # Every step may take one more word than the row above; a maximum carries it on.
        taken = np.append(0, row[:-1] + (right == word))
        row = np.maximum.accumulate(np.maximum(row, taken))
    return int(row[-1])
