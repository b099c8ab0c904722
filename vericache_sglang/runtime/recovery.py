"""Recovery from errors in an iteration: prefill one request or all requests again.

Emitted tokens were verified, so a request whose KV is unreliable loses only time: it is
sent back to prefill and then decodes autoregressively. After a second error the request
is aborted, with an error to its client.

Tensor-parallel ranks recover together, so there an error in one request is one in all:
the other ranks have no error of that request.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from vericache_sglang.errors import (
    InvariantError,
    LostRankError,
    RankError,
    quoted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sglang.srt.managers.schedule_batch import Req

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.placement import KVPlacement
    from vericache_sglang.runtime.tp_sync import TensorParallelSync
    from vericache_sglang.scheduling.runtime import Runtime

logger = logging.getLogger(__name__)

MOST_ERRORS = 1
"""Errors after which a request is prefilled again; one more aborts it."""

MOST_LOGGED = 20
"""Errors that are logged with a traceback; all are counted."""


class Recovery:
    """Decides how the server continues after an error.

    Args:
        states: rid -> running request.
        runtime: Schedules the requests.
        placement: Holds their KV.
        tp_sync: Tells the other ranks of an error.
        strict: Raise every error, as SGLang's strict memory checks require.

    Attributes:
        pending: The error after which block-table rows are unreliable: the KV of every
            request must be freed and all accounting reset.
        doubtful: Resources may have leaked: all accounting must be reset once no
            request runs. Never with several ranks.
    """

    def __init__(
        self,
        states: Mapping[str, RequestState],
        runtime: Runtime,
        placement: KVPlacement,
        tp_sync: TensorParallelSync,
        *,
        strict: bool,
    ) -> None:
        self._states = states
        self._runtime = runtime
        self._memory = placement
        self._tp_sync = tp_sync
        self._strict = strict
        self.pending: Exception | None = None
        self.doubtful = False

    @contextmanager
    def of_request(self, state: RequestState) -> Iterator[None]:
        """On an error inside, prefill this request again and no other."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (``_admit`` raises what it must)
            if not self._tp_sync.alone:
                self.all_lost(error)
                return
            self._admit(error, f"request {quoted(state.rid)}")
            self._memory.counters.request_errors += 1
            self.doubtful = True
            self.lose(state)
            if self.charge(state.req, error):
                state.req.vericache_lost = False

    @contextmanager
    def of_arrival(self, req: Req) -> Iterator[None]:
        """On an error inside, abort a request that has no state yet."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            if not self._tp_sync.alone:
                self.all_lost(error)
                return
            self._admit(error, f"request {quoted(req.rid)}")
            self._memory.counters.request_errors += 1
            _abort(req, error)

    @contextmanager
    def of_all(self) -> Iterator[None]:
        """On an error inside, prefill every request again and flush the cache."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.all_lost(error)

    def all_lost(self, error: Exception) -> None:
        """Send every request back to prefill and schedule a reset of all accounting.

        Args:
            error: Not attributable to a single request.

        Raises:
            Exception: ``error``, if it is not recoverable.
        """
        if self.pending is not None and isinstance(error, RankError):
            return  # of this error
        self._admit(error, "every running request")
        self._reset_later(error)
        for state in list(self._states.values()):
            self.lose(state)

    def sync_errors(self) -> Exception | None:
        """Return the error after which all ranks must reset all accounting now."""
        ranks, stored = self._memory.ranks, self._memory.segments.stored
        failed = self._tp_sync.sync_errors(self.pending is not None, ranks.tell(stored))
        try:
            # After an error the ranks may have started different fetches.
            ranks.receive(self._tp_sync.told, None if failed else stored)
        except InvariantError as error:  # on all ranks
            self.all_lost(error)
        if failed and self.pending is None:
            self.all_lost(RankError("another rank failed"))
        return self.pending

    def lose(self, state: RequestState) -> None:
        """Send a request back to prefill; its emitted tokens are correct."""
        if state.lost:
            return
        state.leave_row()
        state.req.vericache_distrusted = True
        self._memory.counters.reprefills += 1
        self.each_of(
            lambda: self._runtime.leave(state.rid),
            lambda: self._memory.distrust(state),
        )

    def each_of(self, *steps: Callable[[], object]) -> None:
        """Run every step even if others fail; each step frees a resource."""
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001
                self._admit(error, "what a request frees")
                self._reset_later(error)

    def complete(self) -> None:
        """Clear the flags after all accounting was reset and no request runs."""
        self.pending, self.doubtful = None, False
        self._tp_sync.recovered()

    def charge(self, req: Req, error: Exception) -> bool:
        """Count an error that costs a request its KV; return whether it is aborted."""
        req.vericache_distrusted = True
        req.vericache_errors = getattr(req, "vericache_errors", 0) + 1
        aborted: bool = req.vericache_errors > MOST_ERRORS
        if aborted:
            _abort(req, error)
        return aborted

    def _reset_later(self, error: Exception) -> None:
        """Schedule a reset of all accounting."""
        self._memory.counters.iteration_errors += 1
        if self.pending is None:
            self.pending = error
            if self._tp_sync.alone:
                self._memory.segments.abandon()
        self._tp_sync.fail()

    def _admit(self, error: Exception, costs: str) -> None:
        """Log a recoverable error; raise any other."""
        if self._strict or isinstance(error, (torch.AcceleratorError, LostRankError)):
            raise error
        counters = self._memory.counters
        if counters.request_errors + counters.iteration_errors < MOST_LOGGED:
            logger.error(
                "VeriCache: an error costs %s its KV, which is prefilled again",
                costs,
                exc_info=error,
            )


def _abort(req: Req, error: Exception) -> None:
    """Finish a request as aborted, with an error to its client."""
    req.skip_radix_cache_insert = True
    message = f"VeriCache: {type(error).__name__}: {quoted(str(error))}"
    req.to_finish = FINISH_ABORT(message, 500, "InternalServerError")
