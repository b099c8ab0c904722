"""The modelled machine: a clock with events, memory counted in slots, two links."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

from vericache_sglang.simulation.link import SerialLink
from vericache_sglang.simulation.room import Room, SharedRoom

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_sglang.simulation.costs import Costs


class SimulatedMachine:
    """What there is; decides nothing.

    Args:
        costs: Rates and sizes.
        staging_slots: Part of the device's slots set aside for reloads.
        host_slots: Slots of host memory.

    Attributes:
        now: Simulated time, in seconds.
        pool: Device slots of running requests.
        staging: Reloaded complements by key.
        host: Complements by key, and parked draft parts.
    """

    def __init__(self, costs: Costs, staging_slots: int, host_slots: int) -> None:
        self.costs = costs
        self.now = 0.0
        self.pool = Room("KV pool", costs.slots - staging_slots)
        self.staging = SharedRoom("staging region", staging_slots)
        self.host = SharedRoom("host budget", host_slots)
        self.to_device = SerialLink(costs.link_bytes_per_s, costs.link_latency_s)
        self.to_host = SerialLink(costs.link_bytes_per_s, costs.link_latency_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        # Breaks ties in the order of calls: callbacks have no order of their own.
        self._serial = count()

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """Let something happen at ``when``; at the next ``advance`` if that is past."""
        heapq.heappush(self._events, (max(when, self.now), next(self._serial), happen))

    def next_event(self) -> float | None:
        """Return when something happens next, None if nothing will."""
        return self._events[0][0] if self._events else None

    def advance(self, to: float) -> None:
        """Move the clock to ``to``; everything up to it happens, in order."""
        while self._events and self._events[0][0] <= to:
            when, _, happen = heapq.heappop(self._events)
            self.now = max(self.now, when)
            happen()
        self.now = max(self.now, to)

    def give_at(self, when: float, slots: int) -> None:
        """Give pool slots back at ``when``: they are being copied away until then."""
        if when <= self.now:
            self.pool.give(slots)
        else:
            self.at(when, lambda: self.pool.give(slots))
