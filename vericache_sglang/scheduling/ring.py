"""Reserve rings: the reserved amount of one resource in the next W iterations."""

from __future__ import annotations

from itertools import accumulate, repeat
from operator import lt, neg
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WINDOW = 1_000_000
"""Link time of one iteration, in microwindows: the capacity of the link ring."""


class Ring:
    """Reserved integer amounts of one resource in the next W scheduler iterations.

    The T[i] and B[i] of the paper's resource model (arXiv:2605.17613, section 5). A
    window is one scheduler iteration; iterations have absolute indices, and the horizon
    is ``now`` to ``now + windows - 1``. The unit depends on the ring: microwindows of
    link time, KV slots of the staging buffer, or verify rows.

    Args:
        windows: W, in iterations, >= 1.
        limit: Capacity of one iteration, in the ring's unit, >= 0.

    Attributes:
        windows: W, in iterations.
        limit: Capacity of one iteration, in the ring's unit.
        now: Absolute index of the current iteration.

    Raises:
        InvariantError: ``windows`` or ``limit`` is out of bounds.
    """

    def __init__(self, windows: int, limit: int) -> None:
        if windows < 1 or limit < 0:
            raise InvariantError(f"a ring of {windows} windows of {limit} cannot be")
        self.windows = windows
        self.limit = limit
        self.now = 0
        # Iteration w is at index w % windows; slide() clears the one it removes.
        self._used = [0] * windows

    def used(self, window: int) -> int:
        """Return the amount reserved in absolute ``window``; 0 outside the horizon."""
        if not self.now <= window < self.now + self.windows:
            return 0
        return self._used[window % self.windows]

    def room(self, first: int, last: int) -> list[int]:
        """Return the amount free in each of the iterations; 0 outside the horizon."""
        end = self.now + self.windows
        return [
            self.limit - self._used[window % self.windows]
            if self.now <= window < end
            else 0
            for window in range(first, last + 1)
        ]

    def fits(self, first: int, last: int, amount: int) -> bool:
        """Return whether ``amount`` is free in every iteration from first to last.

        False when an iteration is outside the horizon; true for no iterations, with
        ``first > last``.
        """
        if first > last:
            return True
        if first < self.now or last >= self.now + self.windows:
            return False
        return max(self._levels(first, last)) + amount <= self.limit

    def ends(self, amount: int, length: int) -> int:
        """Find the ends of ``length`` >= 1 iterations that each have ``amount`` free.

        Returns:
            A bit set: bit i is set if and only if ``amount`` fits in the ``length``
            iterations up to ``now + i``. O(W + log(length) * W / 64).
        """
        most = self.limit - amount
        if max(self._used) <= most:
            free = (1 << self.windows) - 1
        else:
            free = _bits(["1" if used <= most else "0" for used in self.horizon()])
        known = 1
        while known < length and free:
            step = min(known, length - known)
            free &= free << step
            known += step
        return free

    def covers(self, amount: int, length: int) -> int:
        """Find the ends of ``length`` >= 1 iterations that in sum have ``amount`` free.

        Returns:
            A bit set: bit i is set if and only if the ``length`` iterations up to
            ``now + i`` are in the horizon and have ``amount`` free in sum. O(W).
        """
        most = length * self.limit - amount
        if most < 0 or length > self.windows:
            return 0
        if length * max(self._used) <= most:
            return (1 << self.windows) - (1 << (length - 1))
        before = [0, *accumulate(self.horizon())]
        spans = zip(before, before[length:], strict=False)
        free = _bits(["1" if end - start <= most else "0" for start, end in spans])
        return free << (length - 1)

    def reserve(self, first: int, last: int, amount: int) -> None:
        """Reserve ``amount`` >= 0 in every iteration from first to last.

        Raises:
            InvariantError: It does not fit, or an iteration is outside the horizon;
                nothing is reserved then.
        """
        if amount < 0 or not self.fits(first, last, amount):
            raise InvariantError(
                f"{amount} does not fit in windows {first} to {last}: "
                f"room {self.room(first, last)}, now {self.now}"
            )
        self._add(first, repeat(amount, last - first + 1))

    def fill(self, first: int, last: int, amount: int) -> tuple[int, ...]:
        """Reserve ``amount`` >= 0 in sum, filling the earliest iterations first.

        Returns:
            The amount reserved in each iteration from first to last; see ``take_back``.

        Raises:
            InvariantError: Less is free, or an iteration is outside the horizon;
                nothing is reserved then.
        """
        room = self.room(first, last)
        if amount < 0 or sum(room) < amount or not self.fits(first, last, 0):
            raise InvariantError(
                f"{amount} in all is not free in windows {first} to {last}: "
                f"room {room}, now {self.now}"
            )
        left, taken = amount, []
        for free in room:
            taken.append(min(free, left))
            left -= taken[-1]
        self._add(first, taken)
        return tuple(taken)

    def release(self, first: int, last: int, amount: int) -> None:
        """Release ``amount`` >= 0 of every iteration; past iterations are ignored.

        Raises:
            InvariantError: Less is reserved, or an iteration is beyond the horizon;
                nothing is released then.
        """
        first = max(first, self.now)
        if first > last:
            return
        if last >= self.now + self.windows or not 0 <= amount <= min(
            self._levels(first, last)
        ):
            raise InvariantError(
                f"windows {first} to {last} cannot free {amount} each: not all hold it"
            )
        self._add(first, repeat(-amount, last - first + 1))

    def take_back(self, first: int, amounts: Sequence[int]) -> None:
        """Release one amount >= 0 per iteration; past iterations are ignored.

        Args:
            first: Iteration of the first amount.
            amounts: As ``fill`` returned them.

        Raises:
            InvariantError: As for ``release``.
        """
        ahead = amounts[max(0, self.now - first) :]
        if not ahead:
            return
        first = max(first, self.now)
        last = first + len(ahead) - 1
        if (
            last >= self.now + self.windows
            or min(ahead) < 0
            or any(map(lt, self._levels(first, last), ahead))
        ):
            raise InvariantError(
                f"windows {first} to {last} cannot free {ahead}: not all hold it"
            )
        self._add(first, map(neg, ahead))

    def slide(self) -> None:
        """Remove the current iteration and append an empty one. O(1)."""
        self._used[self.now % self.windows] = 0
        self.now += 1

    def horizon(self) -> list[int]:
        """Return the reserved amount of every iteration, the current one first."""
        start = self.now % self.windows
        return self._used[start:] + self._used[:start]

    def _levels(self, first: int, last: int) -> list[int]:
        """Return the reserved amounts of iterations inside the horizon."""
        start, end = first % self.windows, last % self.windows
        if start <= end:
            return self._used[start : end + 1]
        return self._used[start:] + self._used[: end + 1]

    def _add(self, first: int, amounts: Iterable[int]) -> None:
        for window, amount in enumerate(amounts, first):
            self._used[window % self.windows] += amount


def _bits(digits: list[str]) -> int:
    """Return the bit set with bit i set where digit i is "1"."""
    # int() of a binary literal is the fastest conversion; the highest bit is first.
    return int("".join(digits)[::-1], 2)
