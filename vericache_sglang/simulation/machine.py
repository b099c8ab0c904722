"""The modelled machine: an event clock, memory counted in KV slots, two links."""

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
    """Clock, memory and links of the modelled machine; makes no decisions.

    Args:
        costs: Rates and sizes.
        staging_slots: Device slots of the staging buffer.
        host_slots: KV slots of host memory.

    Attributes:
        now: Simulated time, in seconds.
        pool: Device slots of running requests.
        staging: Prefetched residual KV by key.
        host: Residual KV by key, and swapped-out draft KV.
    """

    def __init__(self, costs: Costs, staging_slots: int, host_slots: int) -> None:
        self.costs = costs
        self.now = 0.0
        self.pool = Room("KV pool", costs.slots - staging_slots)
        self.staging = SharedRoom("staging buffer", staging_slots)
        self.host = SharedRoom("host budget", host_slots)
        self.to_device = SerialLink(costs.link_bytes_per_s, costs.link_latency_s)
        self.to_host = SerialLink(costs.link_bytes_per_s, costs.link_latency_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        # Orders events of equal time by call; callbacks cannot be compared.
        self._serial = count()

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """Schedule a callback at ``when``; a past time runs at the next ``advance``."""
        heapq.heappush(self._events, (max(when, self.now), next(self._serial), happen))

    def next_event(self) -> float | None:
        """Return the time of the next event; None if there is none."""
        return self._events[0][0] if self._events else None

    def advance(self, to: float) -> None:
        """Advance the clock to ``to`` and run all events up to it, in order."""
        while self._events and self._events[0][0] <= to:
            when, _, happen = heapq.heappop(self._events)
            self.now = max(self.now, when)
            happen()
        self.now = max(self.now, to)

    def give_at(self, when: float, slots: int) -> None:
        """Free pool slots at ``when``, when the copy from them ends."""
        if when <= self.now:
            self.pool.give(slots)
        else:
            self.at(when, lambda: self.pool.give(slots))
