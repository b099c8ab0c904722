"""Reloads: complements on their way into the staging region, and back out of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from vericache_sglang.engine.layer_gate import (
    ForwardPace,
    LayerGate,
    stands_still_s,
    worth_starting,
)
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.ledger import Account

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vericache_sglang.engine.counters import Counters
    from vericache_sglang.engine.link_log import LinkLog
    from vericache_sglang.memory.complement import DraftParts
    from vericache_sglang.memory.host_store import HostStore
    from vericache_sglang.memory.ledger import Ledger
    from vericache_sglang.memory.staging import Lease, Span, StagingRegion
    from vericache_sglang.memory.transfers import Incoming, Transfer, Transfers

    Gather = Callable[[Sequence[float]], list[list[float]]]
    """Returns every rank's values, by rank; see ``Agreement.gather``."""

logger = logging.getLogger(__name__)


class Progress(IntEnum):
    """How far a reload is; of several ranks, the one furthest behind counts.

    ARRIVING: so much is here that a verification over it may start (``LayerGate``).
    """

    FAILED = 0
    TRAVELLING = 1
    ARRIVING = 2
    ARRIVED = 3


@dataclass(slots=True)
class Staged:
    """One complement in the staging region, or on its way there.

    Attributes:
        lease: Its slots.
        slots: Of these, slots filled.
        transfer: The copy; None once it has arrived.
        users: Requests that are to be verified over it, first come first.
        told: Those of them whose arrival was reported.
        opened: A verification over it may start.
        passed: One was launched that has waited for every layer.
    """

    lease: Lease
    slots: int
    transfer: Incoming | None
    users: dict[str, None] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    opened: bool = False
    passed: bool = False


def alone(values: Sequence[float]) -> list[list[float]]:
    """Return what a gather of one rank does."""
    return [list(values)]


class Reloads:
    """Starts, polls and ends the copies a plan asks for.

    Requests that share a complement share its staging: one copy, one lease.

    Args:
        region: The staging slots.
        transfers: What copies.
        host: Where the complements are.
        ledger: Where taken slots are booked.
        counters: Staged bytes and seconds are added here.
        link: Is told of copies that have ended.

    Attributes:
        region: The staging slots.
        gather: Of the ranks; asked where a verification started early, on all alike.
        pace: How long forwards take per layer.
    """

    def __init__(
        self,
        region: StagingRegion,
        transfers: Transfers,
        host: HostStore,
        ledger: Ledger,
        counters: Counters,
        link: LinkLog,
    ) -> None:
        self.region = region
        self.gather: Gather = alone
        self.pace = ForwardPace()
        self._transfers = transfers
        self._host = host
        self._ledger = ledger
        self._counters = counters
        self._link = link
        self._leaving: list[tuple[str, Incoming]] = []
        self._staged: dict[str, Staged] = {}
        self._key_of: dict[str, str] = {}

    def start(self, rid: str, key: str, drafts: DraftParts) -> int:
        """Start staging a request's complement, or join the one that is staged.

        Args:
            rid: Request id.
            key: What its staging is known by; equal for those who share.
            drafts: Its draft part, which the complement may have to be joined with.

        Returns:
            Bytes put on the link; 0 where another request's are used.

        Raises:
            InvariantError: The plan promised room that is not there.
        """
        self._key_of[rid] = key
        staged = self._staged.get(key)
        if staged is not None:
            staged.users[rid] = None
            self._counters.shared_reloads += 1
            return 0
        complement = self._host.complement(rid)
        lease = self.region.take(complement.slots)
        if lease is None:
            raise InvariantError(f"no staging room for {complement.slots} slots")
        self._ledger.take(Account.STAGING_SLOTS, key, lease.slots)
        transfer = self._transfers.start(complement, lease, drafts)
        self._staged[key] = Staged(lease, complement.slots, transfer, {rid: None})
        counters = self._counters
        counters.peak_staged_bytes = max(
            counters.peak_staged_bytes,
            self.region.used * self._host.geometry.token_bytes,
        )
        return transfer.nbytes

    def progress(self, iteration_s: float = 0.0, rows: int = 1) -> list[Progress]:
        """Return how far every reload is, in the order they were started.

        Args:
            iteration_s: Seconds of an iteration; 0 where forwards may not start early,
                as under CUDA graphs.
            rows: Requests that would stand still with an early one, >= 1.
        """
        staged = self._staged.values()
        return [self._progress(each, iteration_s, rows) for each in staged]

    def poll(self, agreed: Sequence[int] | None = None) -> tuple[list[str], list[str]]:
        """Notice finished copies.

        Args:
            agreed: ``progress`` as all ranks agreed on it; None: as it is here.

        Returns:
            Requests that may be verified since the last call: their complement has
            arrived, or is arriving; and those whose copy failed, which hold no staging
            any more.
        """
        self._note_rates()
        arrived: list[str] = []
        failed: list[str] = []
        reached = self.progress() if agreed is None else agreed
        for staged, at in zip(list(self._staged.values()), reached, strict=True):
            if at == Progress.FAILED:
                self._counters.failed_reloads += 1
                failed.extend(staged.users)
                for rid in list(staged.users):
                    self.end(rid)
            elif at >= Progress.ARRIVING:
                staged.opened = True
                if at == Progress.ARRIVED and staged.transfer is not None:
                    self._note_arrival(next(iter(staged.users)), staged.transfer)
                    staged.transfer = None
                arrived.extend(rid for rid in staged.users if rid not in staged.told)
                staged.told.update(staged.users)
        return arrived, failed

    def spans(self, rid: str) -> tuple[Span, ...]:
        """Return the staged complement's slots, in order.

        Raises:
            InvariantError: It has not arrived, nor may it be verified over while it
                does.
        """
        staged = self._staged.get(self._key_of.get(rid, ""))
        if staged is None or not staged.opened:
            raise InvariantError(f"{rid} is verified without its complement")
        return staged.lease.first(staged.slots)

    def gate(self, rids: Iterable[str]) -> LayerGate:
        """Return what a forward has to wait for, layer by layer.

        Args:
            rids: The requests it verifies; those without a staging need nothing.
        """
        copies = {}
        for rid in rids:
            key = self._key_of.get(rid, "")
            staged = self._staged.get(key)
            if staged is None or staged.transfer is None or staged.passed:
                continue  # the device's work behind it sees every layer
            copies[key] = staged.transfer
        return LayerGate(copies, self._host.geometry.layers, self.pace)

    def thrown(self, gate: LayerGate, rids: Iterable[str]) -> set[str]:
        """Say whose verification read what never arrived; after the forward's launch.

        The others' copies are known to be whole, in the order of the device's work. Of
        a failed one, ``poll`` tells in the next iteration; nothing else happens here.

        Args:
            gate: What the forward waited at.
            rids: As given to ``gate``.

        Raises:
            InvariantError: The forward did not wait, see ``LayerGate.close``.
        """
        gate.close()
        self._counters.stood_still_seconds += gate.stood_still_s
        keys = gate.keys
        if not keys:  # as on every rank: what is open was agreed on
            return set()
        ranks = self.gather([float(key in gate.failed) for key in keys])
        failed = {key for key, *bad in zip(keys, *ranks, strict=True) if any(bad)}
        for key in keys:
            self._staged[key].passed = key not in failed
        early = [rid for rid in rids if self._key_of.get(rid) in keys]
        lost = {rid for rid in early if self._key_of[rid] in failed}
        self._counters.early_verifications += len(early)
        self._counters.thrown_verifications += len(lost)
        return lost

    def end(self, rid: str) -> None:
        """Let go of a request's staging; the last user stops a copy that still runs.

        One that a launched forward has waited for is not stopped: its slots are written
        next by a copy behind it, or read by a forward behind that.
        """
        key = self._key_of.pop(rid, None)
        if key is None:
            return
        staged = self._staged[key]
        staged.users.pop(rid)
        staged.told.discard(rid)  # it may join again
        if staged.users:
            return
        if staged.transfer is not None and staged.passed:
            self._leaving.append((rid, staged.transfer))
        elif staged.transfer is not None:
            staged.transfer.cancel()
        self.region.give(staged.lease)
        self._ledger.give(Account.STAGING_SLOTS, key)
        del self._staged[key]

    @property
    def keys(self) -> set[str]:
        """What is staged now, by key."""
        return set(self._staged)

    def _progress(self, staged: Staged, iteration_s: float, rows: int) -> Progress:
        transfer = staged.transfer
        try:
            if transfer is None or transfer.done():
                return Progress.ARRIVED
        except TransferError as error:
            logger.error("VeriCache: reload of %s: %s", list(staged.users), error)
            return Progress.FAILED
        # What was agreed on once stays: a slower link changes it no more.
        if staged.opened or self._may_open(staged, transfer, iteration_s, rows):
            return Progress.ARRIVING
        return Progress.TRAVELLING

    def _may_open(
        self, staged: Staged, transfer: Incoming, iteration_s: float, rows: int
    ) -> bool:
        arrived = transfer.layers_done
        if not arrived:  # it may wait behind others, for nobody knows how long
            return False
        layers = self._host.geometry.layers
        stall_s = stands_still_s(layers, arrived, transfer.layer_s, self.pace.layer_s)
        return worth_starting(stall_s, rows, iteration_s, len(staged.users))

    def _note_arrival(self, rid: str, transfer: Transfer) -> None:
        self._counters.staged_bytes += transfer.nbytes
        self._counters.stage_seconds += transfer.seconds
        self._link.note(rid, "in", transfer)

    def _note_rates(self) -> None:
        """Count copies that ended behind a verification, and what the link did."""
        travelling = []
        for rid, transfer in self._leaving:
            if transfer.done():
                self._note_arrival(rid, transfer)
            else:
                travelling.append((rid, transfer))
        self._leaving = travelling
        self._counters.link_in_bytes_per_s = self._link.rate("in")
        self._counters.link_out_bytes_per_s = self._link.rate("out")
