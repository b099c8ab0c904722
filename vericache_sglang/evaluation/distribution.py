"""A chi-square test of sampled answers against the full KV's exact distribution.

Many requests with one prompt are drawn without seeds. For every prefix that was drawn
often, plain SGLang gives the exact distribution of the next token; how often each token
followed is compared with it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from vericache_sglang.evaluation.server import Server

    Exact = Callable[[tuple[int, ...]], NDArray[np.float64]]
    """From a prefix of an answer to [vocabulary] probabilities of its next token."""

PARAMS: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"temperature": 0.9},
    "top-p": {"temperature": 1.3, "top_p": 0.7},
    "top-k": {"temperature": 1.1, "top_k": 3},
    "min-p": {"temperature": 1.5, "min_p": 0.15},
    "all": {"temperature": 1.4, "top_p": 0.85, "top_k": 4, "min_p": 0.05},
}
"""Sampling parameters to try, by name."""

LEAST_COUNT = 5
"""Least expected count of a cell; smaller ones are one cell together."""


def exact_distribution(
    logprobs: NDArray[np.float64], params: Mapping[str, Any]
) -> NDArray[np.float64]:
    """Return what a sampler is to draw from, by the definitions.

    Args:
        logprobs: [vocabulary] log-probabilities of the model.
        params: ``temperature`` and optionally ``top_k``, ``top_p`` and ``min_p``.
    """
    scaled = logprobs / params["temperature"]
    rows = np.exp(scaled - scaled.max())
    rows /= rows.sum()
    order = np.argsort(-rows, kind="stable")
    ranked = rows[order]
    before = np.cumsum(ranked) - ranked
    inside = np.arange(len(ranked)) < params.get("top_k", len(ranked))
    inside &= before <= params.get("top_p", 1.0)
    inside &= ranked >= ranked[0] * params.get("min_p", 0.0)
    found = np.zeros(len(rows))
    found[order[inside]] = ranked[inside] / ranked[inside].sum()
    return found


def next_token(server: Server, prompt: Sequence[int], vocabulary: int) -> Exact:
    """Return a function that asks plain SGLang for log-probabilities.

    Args:
        server: Plain SGLang.
        prompt: Token ids before every answer.
        vocabulary: Tokens of the model.
    """

    def ask(prefix: tuple[int, ...]) -> NDArray[np.float64]:
        answer = server.generate(
            {
                "input_ids": [*prompt, *prefix],
                "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
                "return_logprob": True,
                "top_logprobs_num": vocabulary,
            }
        )
        found = np.full(vocabulary, -np.inf)
        for value, token, *_ in answer["meta_info"]["output_top_logprobs"][0]:
            found[token] = -np.inf if value is None else value
        return found

    return ask


def probability(answers: Sequence[Sequence[int]], exact: Exact) -> float:
    """Return the p-value of answers under the exact distribution.

    Args:
        answers: Token ids of each.
        exact: Asked for prefixes that were drawn often enough for a test.

    Returns:
        0 where an impossible token was drawn.

    Raises:
        ValueError: There are too few answers for a test.
    """
    from scipy import stats

    followers: dict[tuple[int, ...], Counter[int]] = {}
    for answer in answers:
        for length, token in enumerate(answer):
            followers.setdefault(tuple(answer[:length]), Counter())[token] += 1
    statistic, freedom = 0.0, 0
    for prefix, drawn in followers.items():
        count = drawn.total()
        if count < 4 * LEAST_COUNT:
            continue
        wanted = count * exact(prefix)
        seen = np.zeros_like(wanted)
        seen[list(drawn)] = list(drawn.values())
        if bool(seen[wanted == 0].any()):
            return 0.0
        alone = wanted >= LEAST_COUNT
        cells = np.append(wanted[alone], wanted[~alone].sum())
        counts = np.append(seen[alone], seen[~alone].sum())
        if cells[-1] < LEAST_COUNT:  # too small for a cell of its own
            cells[0], counts[0] = cells[0] + cells[-1], counts[0] + counts[-1]
            cells, counts = cells[:-1], counts[:-1]
        statistic += float(((counts - cells) ** 2 / cells).sum())
        freedom += len(cells) - 1
    if not freedom:
        raise ValueError(f"{len(answers)} answers are too few for a chi-square test")
    return float(stats.chi2.sf(statistic, freedom))
