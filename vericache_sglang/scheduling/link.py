"""Bandwidth of the host link, estimated from measured transfers."""

from __future__ import annotations

from math import isfinite
from typing import Literal

from vericache_sglang.scheduling.ewma import Ewma

LARGE = 1_000_000
"""Least bytes of a large transfer, whose set-up time is negligible."""

SLOWEST = 1e6
FASTEST = 2e12
"""Bounds of a plausible bandwidth, in bytes/s."""

Direction = Literal["in", "out"]
"""Host to device, or device to host."""

DIRECTIONS: tuple[Direction, Direction] = ("in", "out")


class LinkEstimate:
    """BW of the paper's resource model (arXiv:2605.17613, section 5), measured online.

    One mean per direction and size class, so that many small transfers do not bias the
    estimate for large ones.

    Args:
        start: Initial bandwidth from host to device, in bytes/s.
        start_out: Initial bandwidth from device to host; ``start`` when None.
        weight: Weight of a new sample.

    Raises:
        InvariantError: A starting value is outside [1 MB/s, 2 TB/s].
    """

    def __init__(
        self, start: float, start_out: float | None = None, *, weight: float = 0.1
    ) -> None:
        starts = {"in": start, "out": start if start_out is None else start_out}
        self._rates = {
            (direction, large): Ewma(
                starts[direction], least=SLOWEST, most=FASTEST, weight=weight
            )
            for direction in DIRECTIONS
            for large in (False, True)
        }

    def bytes_per_s(self, bytes_: int, direction: Direction) -> float:
        """Return the estimated bandwidth of a transfer of this size, in bytes/s."""
        return self._rates[direction, bytes_ >= LARGE].value

    def seconds(self, bytes_: int, direction: Direction) -> float:
        """Return the estimated time to transfer ``bytes_`` >= 0, in seconds."""
        return bytes_ / self.bytes_per_s(bytes_, direction)

    def observe(self, bytes_: int, seconds: float, direction: Direction) -> None:
        """Record a finished transfer; implausible sizes and times are ignored."""
        if bytes_ > 0 and seconds > 0 and isfinite(seconds):
            self._rates[direction, bytes_ >= LARGE].observe(bytes_ / seconds)

    def report(self) -> dict[str, float]:
        """Return every estimate by name, in bytes/s."""
        return {
            f"link_{direction}_{'large' if large else 'small'}_bytes_per_s": rate.value
            for (direction, large), rate in self._rates.items()
        }
