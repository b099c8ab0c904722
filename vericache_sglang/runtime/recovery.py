"""Recovery from errors in an iteration: prefill one request or all requests again.

Emitted tokens were verified, so a request whose KV is unreliable loses only time: it is
sent back to prefill and then decodes autoregressively. After a second error the request
is aborted, with an error to its client.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from vericache_sglang.errors import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sglang.srt.managers.schedule_batch import Req

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.placement import KVPlacement
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
        strict: Raise every error, as SGLang's strict memory checks require.

    Attributes:
        pending: Block-table rows are unreliable: the KV of every request must be freed
            and all accounting reset (patches: managers_scheduler_retraction).
        doubtful: Resources may have leaked: all accounting must be reset once no
            request runs (patches: managers_scheduler).
    """

    def __init__(
        self,
        states: Mapping[str, RequestState],
        runtime: Runtime,
        placement: KVPlacement,
        *,
        strict: bool,
    ) -> None:
        self._states = states
        self._runtime = runtime
        self._memory = placement
        self._strict = strict
        self.pending = False
        self.doubtful = False

    @contextmanager
    def of_request(self, state: RequestState) -> Iterator[None]:
        """On an error inside, prefill this request again and no other."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (``_admit`` raises what it must)
            self._admit(error, f"request {quoted(state.rid)}")
            self._memory.counters.request_errors += 1
            self.doubtful = True
            self._lose(state, error)

    @contextmanager
    def of_arrival(self, req: Req) -> Iterator[None]:
        """On an error inside, abort a request that has no state yet."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
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
        self._admit(error, "every running request")
        self._memory.counters.iteration_errors += 1
        self.pending = True
        self._memory.segments.abandon()
        for state in list(self._states.values()):
            if not state.lost:
                self._lose(state, error)

    def lose(self, state: RequestState) -> None:
        """Mark a request to be sent back to prefill; its emitted tokens are correct.

        The hook on the scheduler reads the mark
        (patches: managers_scheduler_retraction).
        """
        if state.lost:
            return
        state.lost = True
        state.req.vericache_lost = True
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
                self._admit(error, "what a request gives back")
                self._memory.counters.iteration_errors += 1
                if not self.pending:
                    self.pending = True
                    self._memory.segments.abandon()

    def complete(self) -> None:
        """Clear the flags after all accounting was reset and no request runs."""
        self.pending = self.doubtful = False

    def _lose(self, state: RequestState, error: Exception) -> None:
        req = state.req
        seen = getattr(req, "vericache_errors", 0) + 1
        req.vericache_errors = seen
        self.lose(state)
        if seen > MOST_ERRORS:
            req.vericache_lost = False
            _abort(req, error)

    def _admit(self, error: Exception, costs: str) -> None:
        """Log a recoverable error; raise any other."""
        if self._strict or isinstance(error, torch.AcceleratorError):
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
