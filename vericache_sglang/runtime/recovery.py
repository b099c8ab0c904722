"""What an error inside an iteration costs: one request's KV, or that of all that run.

Tokens that were emitted were verified, so a request whose KV is in doubt loses nothing
but time: it is sent back to prefill and decodes autoregressively from there. The second
time it is aborted, with an error to its client.
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
"""Errors after which a request is prefilled again; after one more it is aborted."""

MOST_LOGGED = 20
"""Errors that are logged with their traceback; all are counted."""


class Recovery:
    """The one place that decides what goes on after an error.

    Args:
        states: Requests that live, by rid.
        runtime: Plans them.
        placement: Holds their KV.
        strict: Raise every error, as SGLang's strict memory checks want it.

    Attributes:
        pending: What rows list is in doubt: every request is to give its KV back, and
            all that is booked to be forgotten (patches: managers_scheduler_retraction).
        doubtful: Something may be booked that nobody has: to be forgotten once no
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
        """Have an error inside cost this request its KV, and nobody else's."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (``_admit`` raises what it must)
            self._admit(error, f"request {quoted(state.rid)}")
            self._memory.counters.request_errors += 1
            self.doubtful = True
            self._lose(state, error)

    @contextmanager
    def of_arrival(self, req: Req) -> Iterator[None]:
        """Have an error inside abort a request that has no state yet."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._admit(error, f"request {quoted(req.rid)}")
            self._memory.counters.request_errors += 1
            _abort(req, error)

    @contextmanager
    def of_all(self) -> Iterator[None]:
        """Have an error inside cost all that run their KV, and the cache its own."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.all_lost(error)

    def all_lost(self, error: Exception) -> None:
        """Send every request back to prefill, and have all that is booked forgotten.

        Args:
            error: Of which it is not known whom it concerns.

        Raises:
            Exception: ``error``, where it may not be gone on after.
        """
        self._admit(error, "every running request")
        self._memory.counters.iteration_errors += 1
        self.pending = True
        self._memory.segments.abandon()
        for state in list(self._states.values()):
            if not state.lost:
                self._lose(state, error)

    def lose(self, state: RequestState) -> None:
        """Have the scheduler send a request back to prefill; nothing wrong was emitted.

        Read by the hook on the scheduler (patches: managers_scheduler_retraction).
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
        """Make every step, whatever comes of the others; each gives something back."""
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
        """All that was booked is forgotten, and nothing runs."""
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
        """Log an error that may be gone on after; raise every other one."""
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
    """Have a request leave its batch as an aborted one does, with an error."""
    req.skip_radix_cache_insert = True
    message = f"VeriCache: {type(error).__name__}: {quoted(str(error))}"
    req.to_finish = FINISH_ABORT(message, 500, "InternalServerError")
