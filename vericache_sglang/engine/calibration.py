"""First guesses of what an iteration costs, timed at boot on the machine itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from vericache_kernels.run_attention import run_attention
from vericache_sglang.scheduling.estimates import START_COEFFICIENTS
from vericache_sglang.scheduling.iteration_model import Coefficients

if TYPE_CHECKING:
    from collections.abc import Sequence

SHORT, LONG = 256, 4096
"""Row lengths timed, in slots."""

REPEATS = 5
LEAST_S = 1e-13


def starting_coefficients(
    pool: Any, layers: Sequence[Any], draft_length: int
) -> Coefficients:
    """Time attention over the KV pool with one query and with a round's queries.

    What a token costs outside attention, and an iteration's base, are learned while
    serving; the cost of a slot is what drafting saves, and must be known before.

    Args:
        pool: The KV pool; only read.
        layers: The model's ``RadixAttention`` layers.
        draft_length: Most drafts of a round.

    Returns:
        Seconds per unit of work over all layers; the assumed ones where the pool is on
        a GPU, or too small to tell.
    """
    keys, values = pool.k_buffer[0], pool.v_buffer[0]
    long = min(LONG, keys.shape[0])
    if keys.device.type != "cpu" or long < 2 * SHORT:
        return START_COEFFICIENTS
    layer = layers[0]

    def seconds(queries: int, slots: int) -> float:
        q = torch.zeros(queries, layer.tp_q_head_num, layer.head_dim, dtype=keys.dtype)
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            run_attention(q, keys, values, [(0, slots)], layer.scaling)
            times.append(time.perf_counter() - began)
        return min(times)

    queries = draft_length + 1
    one = (seconds(1, long) - seconds(1, SHORT)) / (long - SHORT)
    many = (seconds(queries, long) - seconds(queries, SHORT)) / (long - SHORT)
    product = max(LEAST_S, (many - one) / max(1, queries - 1))
    read = max(LEAST_S, one - product)
    return Coefficients(
        START_COEFFICIENTS.base_s,
        START_COEFFICIENTS.per_token_s,
        read * len(layers),
        product * len(layers),
    )
