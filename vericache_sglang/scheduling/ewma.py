"""An exponentially weighted mean that stays inside bounds."""

from __future__ import annotations

from vericache_sglang.errors import InvariantError


class Ewma:
    """Exponentially weighted mean over about the last ``1 / weight`` samples.

    The first sample replaces the starting value.

    Args:
        start: Value before the first sample, in the caller's unit.
        least: Lower bound of the value, inclusive.
        most: Upper bound, inclusive.
        weight: Share of a new sample, > 0 and <= 1.

    Attributes:
        value: The mean; always inside the bounds.

    Raises:
        InvariantError: ``start`` is outside the bounds, or ``weight`` outside its own.
    """

    __slots__ = ("_least", "_most", "_seen", "_weight", "value")

    def __init__(
        self, start: float, *, least: float, most: float, weight: float = 0.1
    ) -> None:
        if not least <= start <= most or not 0 < weight <= 1:
            raise InvariantError(
                f"mean starts at {start}, outside [{least}, {most}], or weight {weight}"
            )
        self.value = start
        self._least = least
        self._most = most
        self._weight = weight
        self._seen = False

    def observe(self, sample: float, count: int = 1) -> None:
        """Count a sample, clipped to the bounds, ``count`` times; NaN is ignored."""
        if sample != sample:
            return
        sample = min(max(sample, self._least), self._most)
        if self._seen:
            weight = 1 - (1 - self._weight) ** count
            self.value += weight * (sample - self.value)
        else:
            self.value = sample
            self._seen = True
