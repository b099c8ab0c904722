"""Prefetches residual KV into the staging buffer, and frees it again."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.ledger import Account
from vericache_sglang.kv.staging import StagingBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.kv.host_image import DraftReader
    from vericache_sglang.kv.host_store import HostStore
    from vericache_sglang.kv.ledger import Ledger
    from vericache_sglang.kv.staging import Lease, Span
    from vericache_sglang.kv.transfers import Transfer, Transfers
    from vericache_sglang.observability.counters import Counters
    from vericache_sglang.observability.link_log import LinkLog

logger = logging.getLogger(__name__)


class Progress(IntEnum):
    """State of a prefetch; of several ranks, the least advanced one counts."""

    FAILED = 0
    TRAVELLING = 1
    ARRIVED = 2


@dataclass(slots=True)
class Staged:
    """Residual KV in the staging buffer, or on its way there.

    Attributes:
        slots: Number of its slots that are filled.
        transfer: The copy; None once it has arrived.
        users: Ids of the requests to be verified with it, in order of arrival.
        told: Ids of the users to which its arrival was reported.
    """

    lease: Lease
    slots: int
    transfer: Transfer | None
    users: dict[str, None] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)


class StagingPrefetcher:
    """Starts, polls and ends the prefetches of a plan.

    Requests that share residual KV share its staging: one copy, one lease.

    Args:
        region: The staging buffer.
        transfers: Copies between host and pool.
        host: Holds the residual KV.
        ledger: Books the slots taken.
        counters: Staged bytes and seconds are added here.
        link: Records the copies that have ended.

    Attributes:
        region: The staging buffer.
    """

    def __init__(
        self,
        region: StagingBuffer,
        transfers: Transfers,
        host: HostStore,
        ledger: Ledger,
        counters: Counters,
        link: LinkLog,
    ) -> None:
        self.region = region
        self._transfers = transfers
        self._host = host
        self._ledger = ledger
        self._counters = counters
        self._link = link
        self._staged: dict[str, Staged] = {}
        self._key_of: dict[str, str] = {}

    def start(self, rid: str, key: str, drafts: DraftReader | None) -> int:
        """Start prefetching a request's residual KV, or use a copy staged already.

        Args:
            rid: Request id.
            key: Key of its staging; equal for requests that share it.
            drafts: Its draft KV, where the residual KV has to be joined with it.

        Returns:
            Bytes put on the link; 0 where another request's copy is used.

        Raises:
            InvariantError: The staging buffer lacks the room that the plan assumed.
        """
        self._key_of[rid] = key
        staged = self._staged.get(key)
        if staged is not None:
            staged.users[rid] = None
            self._counters.shared_prefetches += 1
            return 0
        residual = self._host.residual(rid)
        lease = self.region.take(residual.slots)
        if lease is None:
            raise InvariantError(f"no staging room for {residual.slots} slots")
        self._ledger.take(Account.STAGING_SLOTS, key, lease.slots)
        transfer = self._transfers.start(residual, lease, drafts)
        self._staged[key] = Staged(lease, residual.slots, transfer, {rid: None})
        counters = self._counters
        counters.peak_staged_bytes = max(
            counters.peak_staged_bytes,
            self.region.used * self._host.geometry.token_bytes,
        )
        return transfer.nbytes

    def progress(self) -> list[Progress]:
        """Return the state of every prefetch, in the order they were started."""
        return [self._progress(each) for each in self._staged.values()]

    def poll(self, agreed: Sequence[int] | None = None) -> tuple[list[str], list[str]]:
        """Record finished copies.

        Args:
            agreed: ``progress`` as all ranks agreed on it; None: that of this rank.

        Returns:
            Requests that became ready for verification since the last call; and those
            whose copy failed, which hold no staging slots any more.
        """
        counters = self._counters
        counters.link_in_bytes_per_s = self._link.rate("in")
        counters.link_out_bytes_per_s = self._link.rate("out")
        arrived: list[str] = []
        failed: list[str] = []
        reached = self.progress() if agreed is None else agreed
        for staged, at in zip(list(self._staged.values()), reached, strict=True):
            if at == Progress.FAILED:
                counters.failed_prefetches += 1
                failed.extend(staged.users)
                for rid in list(staged.users):
                    self.end(rid)
            elif at == Progress.ARRIVED:
                if staged.transfer is not None:
                    counters.staged_bytes += staged.transfer.nbytes
                    counters.prefetch_seconds += staged.transfer.seconds
                    self._link.note(next(iter(staged.users)), "in", staged.transfer)
                    staged.transfer = None
                arrived.extend(rid for rid in staged.users if rid not in staged.told)
                staged.told.update(staged.users)
        return arrived, failed

    def spans(self, rid: str) -> tuple[Span, ...]:
        """Return the slots of a request's staged residual KV, in order.

        Raises:
            InvariantError: It has not arrived on every rank.
        """
        staged = self._staged.get(self._key_of.get(rid, ""))
        if staged is None or staged.transfer is not None:
            raise InvariantError(f"{rid} is verified without its residual KV")
        return staged.lease.first(staged.slots)

    def end(self, rid: str) -> None:
        """Release a request's staging; the last user cancels a running copy."""
        key = self._key_of.pop(rid, None)
        if key is None:
            return
        staged = self._staged[key]
        staged.users.pop(rid)
        staged.told.discard(rid)  # it may be staged again
        if staged.users:
            return
        if staged.transfer is not None:
            staged.transfer.cancel()
        self.region.give(staged.lease)
        self._ledger.give(Account.STAGING_SLOTS, key)
        del self._staged[key]

    def forget_all(self) -> None:
        """Cancel every copy and reset the staging buffer, whatever is booked."""
        for staged in self._staged.values():
            if staged.transfer is not None:
                staged.transfer.cancel()
        self._staged.clear()
        self._key_of.clear()
        region = self.region
        self.region = StagingBuffer(region.start, region.slots, region.page)

    @property
    def keys(self) -> set[str]:
        """Keys of all stagings."""
        return set(self._staged)

    def _progress(self, staged: Staged) -> Progress:
        try:
            here = staged.transfer is None or staged.transfer.done()
        except TransferError as error:
            logger.error("VeriCache: prefetch of %s: %s", list(staged.users), error)
            return Progress.FAILED
        return Progress.ARRIVED if here else Progress.TRAVELLING
