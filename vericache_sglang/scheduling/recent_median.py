"""The median of recent samples."""

from __future__ import annotations

from collections import deque
from statistics import median_low

RECENT = 5
"""Samples that count, an odd number: two of them may be exceptions."""

SILENT = 8
"""Chances without a sample after which the oldest one no longer counts."""


class RecentMedian:
    """The lower median of a starting value and the last ``RECENT`` samples.

    The first samples of a server are exceptions: kernels are compiled, libraries
    loaded. A value that nothing confirms returns to the start, so that a high price
    does not prevent its own correction.

    Args:
        start: Value without samples, in the caller's unit.
        most: Upper bound of a sample.

    Attributes:
        value: The median.
    """

    __slots__ = ("_most", "_passed", "_samples", "_start", "value")

    def __init__(self, start: float, *, most: float) -> None:
        self.value = self._start = start
        self._most = most
        self._samples: deque[float] = deque(maxlen=RECENT)
        self._passed = 0

    def observe(self, sample: float) -> None:
        """Count a sample, clipped to [0, ``most``]."""
        self._samples.append(min(max(sample, 0.0), self._most))
        self._passed = 0
        self._choose()

    def pass_over(self) -> None:
        """Count a chance of a sample; ``observe`` follows if it is taken."""
        self._passed += 1
        if self._passed >= SILENT and self._samples:
            self._passed = 0
            self._samples.popleft()
            self._choose()

    def _choose(self) -> None:
        known = [*self._samples]
        self.value = median_low(
            known if len(known) == RECENT else [self._start, *known]
        )
