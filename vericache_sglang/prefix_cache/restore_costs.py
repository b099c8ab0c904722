"""What bringing a segment back costs, tier by tier, against computing it again."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import expm1, inf
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from vericache_sglang.prefix_cache.segment import Content, Segment, Tier

LEAST_CHANCE = 1e-200
"""Chance of a segment nobody used for ages: worth little, never worth nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds of everything that brings KV back to the device; ``inf``: cannot be done.

    Attributes:
        link_in_s_per_byte: Host to device, in seconds per byte.
        link_out_s_per_byte: Device to host, in seconds per byte.
        store_latency_s: Added to every part read from the store, in seconds.
        store_s_per_byte: Store to host, in seconds per byte; ``inf``: there is none.
        prefill_s_per_token: a of a prefill's a * n + b * n^2 seconds for n tokens.
        prefill_s_per_square: b of the same, in seconds per squared token.

    Raises:
        ConfigError: A price is negative or NaN, or a prefill's is infinite.
    """

    link_in_s_per_byte: float
    link_out_s_per_byte: float
    store_latency_s: float
    store_s_per_byte: float
    prefill_s_per_token: float
    prefill_s_per_square: float
    # Seconds per byte by tier: of what passes through staging, of what stays.
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

    def prefill_s(self, start: int, tokens: int) -> float:
        """Return what computing ``tokens`` after ``start`` others takes, in seconds.

        The difference of a * n + b * n^2 over the segment: dense layers are linear,
        causal attention is quadratic in the prefix.
        """
        square = tokens * (2 * start + tokens)
        return self.prefill_s_per_token * tokens + self.prefill_s_per_square * square

    def fetch_s(self, nbytes: int, tier: Tier, stays: bool) -> float:
        """Return what bringing a part of ``nbytes`` to the device takes, in seconds.

        Args:
            nbytes: Its bytes, >= 1.
            tier: Where it is.
            stays: It needs slots of the pool, as a draft part and a whole segment do:
                they are read at every step. Those slots are taken from something else,
                which travels out first. A complement passes through staging and
                displaces nothing.
        """
        return self._latency[tier] + self._rates[stays][tier] * nbytes

    @property
    def by_tier(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Seconds to bring a part back from each tier, the terms of ``fetch_s``.

        In any case; per byte of what passes through staging; per byte of what stays.
        """
        return self._latency, *self._rates

    def restore_s(self, content: Content) -> float:
        """Return what bringing a segment's parts to the device takes, in seconds.

        Parts follow one another. ``inf`` when one is gone.
        """
        rest, draft = content.residual, content.draft
        if draft is None:
            return self.fetch_s(rest.nbytes, rest.tier, True)
        passing, staying = self._rates
        seconds = self._latency[rest.tier] + passing[rest.tier] * rest.nbytes
        return seconds + self._latency[draft.tier] + staying[draft.tier] * draft.nbytes

    def gain_s(self, segment: Segment) -> float:
        """Return the seconds restoring saves over computing again; may be negative."""
        content = segment.content
        return self.prefill_s(segment.start, content.tokens) - self.restore_s(content)


def reuse_chance(uses: float) -> float:
    """Return the chance that a segment is used again soon, in [1e-200, 1].

    Uses that come as a Poisson stream of rate r leave a decayed count of r / lambda on
    average, lambda = ln 2 / half-life. So the count estimates r / lambda, and
    1 - exp(-count) is the chance of a use within the next 1 / lambda seconds. Only
    the first of them matters: it brings back what had to leave.

    Args:
        uses: Decayed count now, >= 0 (``Segment.uses_at``).
    """
    chance = -expm1(-uses)
    return chance if chance > LEAST_CHANCE else LEAST_CHANCE
