"""The cost of restoring a segment from each tier, and of recomputing it instead."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import inf

import numpy as np

from vericache_sglang.errors import ConfigError

LEAST_CHANCE = 1e-200
"""Lower bound of the reuse chance, so that savings never underflow to zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Time costs of restoring or recomputing KV; ``inf``: impossible.

    Attributes:
        link_in_s_per_byte: Host to device, in seconds per byte.
        link_out_s_per_byte: Device to host, in seconds per byte.
        store_latency_s: Latency of every read of a part from the store, in seconds.
        store_s_per_byte: Store to host, in seconds per byte; ``inf``: no store.
        prefill_s_per_token: Coefficient a, in seconds per token: a prefill of n tokens
            takes a * n + b * n^2 seconds.
        prefill_s_per_square: Coefficient b, in seconds per squared token.

    Raises:
        ConfigError: A cost is negative or NaN, or one of a prefill is infinite.
    """

    link_in_s_per_byte: float
    link_out_s_per_byte: float
    store_latency_s: float
    store_s_per_byte: float
    prefill_s_per_token: float
    prefill_s_per_square: float
    # Seconds per byte by tier: through the staging buffer, and into pool slots.
    _rates: tuple[tuple[float, ...], tuple[float, ...]] = field(
        init=False, repr=False, compare=False
    )
    _latency: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            if not each.init:
                continue
            price = getattr(self, each.name)
            if not price >= 0 or (price == inf and each.name.startswith("prefill")):
                raise ConfigError(
                    f"{each.name} must be >= 0, and finite for a prefill, got {price}"
                )
        into, out = self.link_in_s_per_byte, self.link_out_s_per_byte
        store = self.store_s_per_byte
        passing = (0.0, into, store + into, inf)
        staying = (0.0, into + out, store + into + out, inf)
        object.__setattr__(self, "_rates", (passing, staying))
        object.__setattr__(self, "_latency", (0.0, 0.0, self.store_latency_s, inf))

    def prefill_s(self, start: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return [n] seconds of prefills of ``tokens`` [n] after ``start`` [n] others.

        The difference of a * n + b * n^2 over each segment: dense layers are linear,
        causal attention is quadratic in the prefix.
        """
        square = tokens * (2 * start + tokens)
        linear_s, square_s = self.prefill_s_per_token, self.prefill_s_per_square
        seconds: np.ndarray = linear_s * tokens + square_s * square
        return seconds

    @property
    def by_tier(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """What loading a part to the device costs, by tier.

        Latency in seconds; seconds per byte through the staging buffer; seconds per
        byte into pool slots.

        Draft KV and uncompressed segments need slots of the pool, which every step
        reads: other KV is evicted to the host first to free them. Residual KV passes
        through the staging buffer and displaces nothing.
        """
        return self._latency, *self._rates


def reuse_chance(uses: np.ndarray) -> np.ndarray:
    """Return the chances that segments are used again soon, in [1e-200, 1].

    If uses are a Poisson process of rate r, the decayed count is r / lambda on average,
    with lambda = ln 2 / half-life. So the count estimates r / lambda, and
    1 - exp(-count) is the chance of a use within the next 1 / lambda seconds. Only the
    first of these uses matters, as it restores the evicted segment.

    Args:
        uses: [n] decayed counts now, >= 0 (``Segment.uses_at``).
    """
    chance: np.ndarray = np.maximum(-np.expm1(-uses), LEAST_CHANCE)
    return chance
