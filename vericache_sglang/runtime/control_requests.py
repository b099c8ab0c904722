"""Delays control requests until the scheduler is idle, as they require."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    CloseSessionReqInput,
    FlushCacheReqInput,
    GetInternalStateReq,
    OpenSessionReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)

from vericache_sglang.observability.consistency_check import is_replay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

MOST_ITERATIONS = 256
"""Most scheduler iterations that control requests are held. Counted in iterations, not
seconds, so that all ranks release them in the same iteration."""

BESIDE = (
    *(TokenizedGenerateReqInput, BatchTokenizedGenerateReqInput),
    *(TokenizedEmbeddingReqInput, BatchTokenizedEmbeddingReqInput),
    *(AbortReq, OpenSessionReqInput, CloseSessionReqInput, GetInternalStateReq),
)
"""Control requests that SGLang processes while other requests run."""


def needs_idle(given: Any) -> bool:
    """Return whether a control request requires an idle scheduler.

    While requests run, SGLang refuses a flush and a weight update ends the process.
    Request types that are not listed in ``BESIDE`` count as requiring it.
    """
    return not isinstance(given, BESIDE)


def may_change_answers(given: Any) -> bool:
    """Return whether outputs may legitimately differ after a control request.

    True for new weights, new adapters and unknown request types; False for a flush.
    """
    return needs_idle(given) and not isinstance(given, FlushCacheReqInput)


def brings_weights(given: Any) -> bool:
    """Return whether a request replaces the model's weights, from any source."""
    return type(given).__name__.startswith("UpdateWeight")


class ControlGate:
    """Holds control requests until finished requests have left the batch.

    SGLang streams an answer one iteration before its request leaves the batch, so a
    client may send new weights to a scheduler that is not idle yet, which would end the
    process. Replays of the consistency check are aborted first. If the scheduler is
    busy with client requests, or paused, control requests pass without delay.

    Args:
        on_new_weights: Called before the scheduler loads other weights.

    Attributes:
        epoch: Number of control requests so far after which outputs may differ.
    """

    def __init__(self, on_new_weights: Callable[[], None]) -> None:
        self._on_new_weights = on_new_weights
        self._held: list[Any] = []
        self._iterations = 0
        self.epoch = 0

    def admit(self, scheduler: Any, arrived: Sequence[Any]) -> Sequence[Any]:
        """Return the requests to process now; called once per iteration.

        Args:
            scheduler: SGLang's ``Scheduler``.
            arrived: Requests it has received; order is kept behind held requests.
        """
        if not arrived and not self._held:
            return arrived
        if self._held or any(needs_idle(each) for each in arrived):
            self._held.extend(arrived)
            if self._waits(scheduler):
                return ()
            arrived, self._held, self._iterations = self._held, [], 0
        if any(brings_weights(each) for each in arrived):
            self._on_new_weights()
        self.epoch += sum(map(may_change_answers, arrived))
        return arrived

    def _waits(self, scheduler: Any) -> bool:
        """Return whether the scheduler will soon be idle without new work."""
        if scheduler._engine_paused or scheduler.is_fully_idle():
            return False
        grammars = scheduler.grammar_manager.grammar_queue
        running = (*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue)
        left = [req for req in (*running, *grammars) if not req.finished()]
        if any(not is_replay(req.rid) for req in left):
            return False
        if not self._iterations:
            # By whole ids: our hook lets an abort match nothing else.
            for req in left:
                scheduler.abort_request(AbortReq(rid=req.rid))
        self._iterations += 1
        if self._iterations > MOST_ITERATIONS:
            logger.warning("VeriCache: control requests wait no longer for idleness")
        return self._iterations <= MOST_ITERATIONS
