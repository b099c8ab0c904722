"""Executes a plan's prefetches and KV moves on the modelled machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.plan import (
    Compress,
    Load,
    Move,
    Offload,
    Residency,
    Restore,
    SwapIn,
    SwapOut,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_sglang.scheduling.estimates import Estimates
    from vericache_sglang.simulation.machine import SimulatedMachine
    from vericache_sglang.simulation.requests import Running


class SimulatedMoves:
    """Queues every copy on a link and counts every slot in a ``Room``.

    Copies to the host overlap with forwards and free their slots when they end; the
    next forward waits for loads and swap-ins. On the device the draft KV is beside the
    full KV.

    Args:
        machine: Memory and links.
        estimates: Updated with the times of copies and compressions, as in a server.
        prefetch_fraction: Share of the residual KV's bytes that a prefetch moves.
        coalesce: Whether requests of one group share a prefetched residual KV.
        precomputed: Whether the prompts' compressed KV is in host memory already:
            offloads and compressions then cost nothing.
    """

    def __init__(
        self,
        machine: SimulatedMachine,
        estimates: Estimates,
        *,
        prefetch_fraction: float,
        coalesce: bool,
        precomputed: bool,
    ) -> None:
        self._machine = machine
        self._estimates = estimates
        self._prefetch_fraction = prefetch_fraction
        self._coalesce = coalesce
        self._precomputed = precomputed
        self.arrived: list[str] = []
        self.swapped_waits_s: list[float] = []

    def group(self, state: Running) -> str:
        """Return the key of the request's shared residual KV; "" if not shared."""
        return state.request.group if self._coalesce else ""

    def stage(self, state: Running) -> None:
        """Start a prefetch, or share one that was started.

        Raises:
            InvariantError: The residual KV is not in host memory.
        """
        machine, key = self._machine, self._key(state)
        if state.residency is not Residency.HOST:
            raise InvariantError(f"{state.rid} is prefetched from {state.residency}")
        state.stage += 1
        state.arrived = False
        if machine.staging.join(key, state.rid, state.dropped):
            size = self._bytes(state)
            after = machine.host.ready_at.get(key, 0.0)
            copy = machine.to_device.book(machine.now, size, after)
            machine.staging.ready_at[key] = copy.end
            machine.at(copy.end, self._observe_link(size, copy.seconds, inward=True))
        stage = state.stage

        def arrive() -> None:
            if state.stage == stage:
                state.arrived = True
                self.arrived.append(state.rid)

        machine.at(machine.staging.ready_at[key], arrive)

    def unstage(self, state: Running) -> None:
        """Drop the request's prefetched residual KV, or one in flight."""
        state.stage += 1
        state.arrived = False
        self._machine.staging.leave(self._key(state), state.rid)

    def leave(self, state: Running) -> None:
        """Free everything that a request holds."""
        machine = self._machine
        self.unstage(state)
        machine.host.leave(self._key(state), state.rid)
        if state.residency is Residency.SWAPPED:
            machine.host.give(state.draft_slots)
        machine.pool.give(state.held)
        state.held = 0

    def perform(self, state: Running, move: Move) -> bool:
        """Execute a move; return False if memory is short."""
        if isinstance(move, Compress):
            return self._split(state, move.residency)
        action: dict[type[Move], Callable[[Running], bool]] = {
            Restore: self._fall_back,
            Offload: self._offload,
            Load: self._pin,
            SwapOut: self._swap_out,
            SwapIn: self._resume,
        }
        return action[type(move)](state)

    def _split(self, state: Running, residency: Residency) -> bool:
        machine = self._machine
        if residency is Residency.HOST:
            if not self._offload(state):
                return False
        elif machine.pool.free < state.kept:
            return False
        else:
            self._take(state, state.kept)
        state.split = True
        if not self._precomputed:
            seconds = machine.costs.split_s(state.base)
            self._estimates.split_s.observe(seconds / state.base)
            machine.advance(machine.now + seconds)
        return True

    def _fall_back(self, state: Running) -> bool:
        self._give(state, state.kept + state.drafts, self._machine.now)
        state.drafts = 0
        state.split = False
        return True

    def _offload(self, state: Running) -> bool:
        machine, key = self._machine, self._key(state)
        if not machine.host.fits(key, state.dropped):
            return False
        if machine.host.join(key, state.rid, state.dropped):
            ready = machine.now
            if not self._precomputed:
                ready = self._copy_out(self._bytes(state))
            machine.host.ready_at[key] = ready
        beside = state.kept if state.split else 0
        self._give(state, state.dropped + beside, machine.host.ready_at[key])
        state.residency = Residency.HOST
        return True

    def _pin(self, state: Running) -> bool:
        machine, key = self._machine, self._key(state)
        if machine.pool.free < state.base:
            return False
        self._take(state, state.base)
        self._copy_in(self._bytes(state), machine.host.ready_at[key])
        self.unstage(state)
        machine.host.leave(key, state.rid)
        state.residency = Residency.DEVICE
        return True

    def _swap_out(self, state: Running) -> bool:
        machine, slots = self._machine, state.draft_slots
        if machine.host.free < slots:
            return False
        machine.host.take(slots)
        self._give(state, slots, self._copy_out(slots * machine.costs.token_bytes))
        state.residency = Residency.SWAPPED
        state.swapped_s = machine.now
        return True

    def _resume(self, state: Running) -> bool:
        machine, slots = self._machine, state.draft_slots
        if machine.pool.free < slots:
            return False
        self._take(state, slots)
        # Copies to the host are a queue, so the last one queued ends last.
        self._copy_in(slots * machine.costs.token_bytes, machine.to_host.free_at)
        machine.host.give(slots)
        state.residency = Residency.HOST
        self.swapped_waits_s.append(machine.now - state.swapped_s)
        return True

    def _copy_out(self, size: int) -> float:
        machine = self._machine
        copy = machine.to_host.book(machine.now, size)
        machine.at(copy.end, self._observe_link(size, copy.seconds, inward=False))
        return copy.end

    def _copy_in(self, size: int, after: float) -> None:
        machine = self._machine
        copy = machine.to_device.book(machine.now, size, after)
        machine.at(copy.end, self._observe_link(size, copy.seconds, inward=True))
        machine.advance(copy.end)

    def _observe_link(
        self, size: int, seconds: float, *, inward: bool
    ) -> Callable[[], None]:
        link = self._estimates.link
        return lambda: link.observe(size, seconds, "in" if inward else "out")

    def _take(self, state: Running, slots: int) -> None:
        self._machine.pool.take(slots)
        state.held += slots

    def _give(self, state: Running, slots: int, when: float) -> None:
        state.held -= slots
        self._machine.give_at(when, slots)

    def _bytes(self, state: Running) -> int:
        size = state.dropped * self._machine.costs.token_bytes
        return int(size * self._prefetch_fraction)

    def _key(self, state: Running) -> str:
        return self.group(state) or state.rid
