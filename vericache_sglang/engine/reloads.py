"""Reloads: complements on their way into the staging region, and back out of it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.ledger import Account

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vericache_sglang.engine.counters import Counters
    from vericache_sglang.engine.state import RequestState, TwoParts
    from vericache_sglang.memory.ledger import Ledger
    from vericache_sglang.memory.staging import StagingRegion
    from vericache_sglang.memory.transfers import Transfers

logger = logging.getLogger(__name__)


class Reloads:
    """Starts, polls and ends the copies a plan asks for.

    Args:
        region: The staging slots.
        transfers: What copies.
        ledger: Where taken slots are booked.
        counters: Staged bytes and seconds are added here.
        token_bytes: Bytes of one token over all layers.
    """

    def __init__(
        self,
        region: StagingRegion,
        transfers: Transfers,
        ledger: Ledger,
        counters: Counters,
        token_bytes: int,
    ) -> None:
        self.region = region
        self._transfers = transfers
        self._ledger = ledger
        self._counters = counters
        self._token_bytes = token_bytes
        self._slot_seconds = 0.0

    def start(self, state: RequestState) -> None:
        """Start staging a split request's complement.

        Raises:
            InvariantError: The planner promised room that is not there.
        """
        parts = _parts(state)
        rid: str = state.req.rid
        span = self.region.take(parts.budget.dropped)
        if span is None:
            raise InvariantError(f"no staging span of {parts.budget.dropped} slots")
        self._ledger.take(Account.STAGING_SLOTS, rid, span.slots)
        parts.span = span
        parts.loaded = False
        parts.transfer = self._transfers.start(parts.complement, span)

    def poll(self, states: Iterable[RequestState]) -> list[str]:
        """Notice finished copies.

        Returns:
            Ids of requests whose copy failed; their complement cannot be trusted.
        """
        failed = []
        for state in states:
            parts = state.parts
            if parts is None or parts.transfer is None:
                continue
            try:
                arrived = parts.transfer.done()
            except TransferError as error:
                logger.error("VeriCache: reload of %s failed: %s", state.req.rid, error)
                failed.append(state.req.rid)
                continue
            if arrived:
                self._arrived(parts)
        return failed

    def end(self, state: RequestState) -> None:
        """Give a request's staging slots back; stops a copy that still runs."""
        parts = state.parts
        if parts is None or parts.span is None:
            return
        if parts.transfer is not None:
            parts.transfer.cancel()
        self.region.give(parts.span)
        self._ledger.give(Account.STAGING_SLOTS, state.req.rid)
        parts.span, parts.transfer, parts.loaded = None, None, False

    def lead(self, slots: int, iteration_seconds: float, most: int) -> int:
        """Estimate how many iterations a reload takes.

        Args:
            slots: Complement length.
            iteration_seconds: Recent time of one iteration; 0.0 while unknown.
            most: Upper bound, in iterations.

        Returns:
            At least 1, as a copy started now is at best ready in the next iteration.
        """
        if iteration_seconds <= 0.0 or self._slot_seconds <= 0.0:
            return min(2, most)
        needed = math.ceil(slots * self._slot_seconds / iteration_seconds)
        return max(1, min(most, needed + 1))

    def _arrived(self, parts: TwoParts) -> None:
        span = parts.span
        if parts.transfer is None or span is None:
            raise InvariantError("a copy without a span arrived")
        seconds = parts.transfer.seconds
        parts.transfer, parts.loaded = None, True
        self._counters.staged_bytes += span.slots * self._token_bytes
        self._counters.stage_seconds += seconds
        per_slot = seconds / span.slots
        old = self._slot_seconds
        self._slot_seconds = per_slot if old == 0.0 else 0.8 * old + 0.2 * per_slot


def _parts(state: RequestState) -> TwoParts:
    if state.parts is None:
        raise InvariantError(f"{state.req.rid} is not split")
    return state.parts
