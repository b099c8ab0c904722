"""The requests a plan is made for: KV sizes, equal or mixed, in arrival order."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Requests:
    """An endless queue that repeats a pattern of KV sizes.

    Attributes:
        pattern: Full KV of the requests of one period, in bytes, each > 0.
        concurrency: Most requests that ever run at once, >= 1; None: no such limit.
    """

    pattern: tuple[float, ...]
    concurrency: int | None = None
    _sums: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.pattern or min(self.pattern) <= 0:
            raise ConfigError("--context must give every request some KV")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"--concurrency must be >= 1, got {self.concurrency}")
        object.__setattr__(self, "_sums", tuple(accumulate(self.pattern, initial=0.0)))

    def kv_bytes(self, count: int) -> float:
        """Return the full KV of the first ``count`` requests together, in bytes."""
        periods, rest = divmod(count, len(self.pattern))
        return periods * self._sums[-1] + self._sums[rest]

    @property
    def mean_kv_bytes(self) -> float:
        """Full KV of a mean request, in bytes."""
        return self._sums[-1] / len(self.pattern)

    def fitting(self, room_bytes: float, share: float = 1.0, skip: int = 0) -> int:
        """Return how many requests fit into ``room_bytes``, in arrival order.

        Args:
            room_bytes: Device memory for them; below 0 nothing fits.
            share: Part of its full KV that each of them occupies, > 0.
            skip: Requests that come first and are held elsewhere.

        Returns:
            A count; whole requests only, at most ``concurrency`` with ``skip``.
        """
        taken = self.kv_bytes(skip)
        low, high = 0, int(room_bytes / (min(self.pattern) * share)) + 1
        if self.concurrency is not None:
            high = min(high, self.concurrency - skip)
        if high <= 0:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if (self.kv_bytes(skip + middle) - taken) * share <= room_bytes:
                low = middle
            else:
                high = middle - 1
        return low


def equal_requests(kv_bytes: float, concurrency: int | None = None) -> Requests:
    """Return requests of one KV size, in bytes."""
    return Requests((kv_bytes,), concurrency)


def mixed_requests(
    contexts: Sequence[tuple[int, int]],
    kv_bytes_per_token: float,
    concurrency: int | None = None,
) -> Requests:
    """Return requests of several lengths, evenly interleaved.

    Args:
        contexts: (context in tokens, how many of them in a period), each >= 1.
        kv_bytes_per_token: KV of one token, in bytes.
        concurrency: See ``Requests``.

    Raises:
        ConfigError: No context, or a length or count below 1.
    """
    if any(tokens < 1 or count < 1 for tokens, count in contexts):
        raise ConfigError("--context needs lengths and counts of at least 1")
    places = sorted(
        ((index + 0.5) / count, group)
        for group, (_, count) in enumerate(contexts)
        for index in range(count)
    )
    pattern = tuple(contexts[group][0] * kv_bytes_per_token for _, group in places)
    return Requests(pattern, concurrency)
