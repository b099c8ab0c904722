"""The modelled machine: an event clock, memory counted in KV slots, two links."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.simulation.clock import Clock
from vericache_sglang.simulation.link import SerialLink
from vericache_sglang.simulation.room import Room, SharedRoom

if TYPE_CHECKING:
    from vericache_sglang.simulation.costs import Costs


class SimulatedMachine(Clock):
    """Clock, memory and links of the modelled machine; makes no decisions.

    Args:
        costs: Rates and sizes.
        staging_slots: Device slots of the staging buffer.
        host_slots: KV slots of host memory.

    Attributes:
        pool: Device slots of running requests.
        staging: Prefetched residual KV by key.
        host: Residual KV by key, and swapped-out draft KV.
    """

    def __init__(self, costs: Costs, staging_slots: int, host_slots: int) -> None:
        super().__init__()
        self.costs = costs
        self.pool = Room("KV pool", costs.slots - staging_slots)
        self.staging = SharedRoom("staging buffer", staging_slots)
        self.host = SharedRoom("host budget", host_slots)
        self.to_device = SerialLink(costs.link_bytes_per_s, costs.link_latency_s)
        self.to_host = SerialLink(costs.link_bytes_per_s, costs.link_latency_s)

    def give_at(self, when: float, slots: int) -> None:
        """Free pool slots at ``when``, when the copy from them ends."""
        if when <= self.now:
            self.pool.give(slots)
        else:
            self.at(when, lambda: self.pool.give(slots))
