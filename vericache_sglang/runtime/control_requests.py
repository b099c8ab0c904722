"""Lets control requests find the idle scheduler that they expect."""

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

from vericache_sglang.observability.consistency_check import REPLAY_PREFIX, is_replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

MOST_ITERATIONS = 256
"""Scheduler iterations for which control requests are held. Not seconds: all ranks have
to pass them on in the same iteration."""

BESIDE = (
    *(TokenizedGenerateReqInput, BatchTokenizedGenerateReqInput),
    *(TokenizedEmbeddingReqInput, BatchTokenizedEmbeddingReqInput),
    *(AbortReq, OpenSessionReqInput, CloseSessionReqInput, GetInternalStateReq),
)
"""Requests that are served beside running ones."""


def needs_idle(given: Any) -> bool:
    """Return whether a request may expect an idle server once all answers are out.

    A flush is refused, and a weight update ends the process, while requests run. What
    is not known to be harmless counts as such a request.
    """
    return not isinstance(given, BESIDE)


def may_change_answers(given: Any) -> bool:
    """Return whether earlier answers may rightly differ from those after a request.

    True of new weights and adapters, and of what is not known; a flush changes none.
    """
    return needs_idle(given) and not isinstance(given, FlushCacheReqInput)


def brings_weights(given: Any) -> bool:
    """Return whether a request replaces the model's weights, wherever they are from."""
    return type(given).__name__.startswith("UpdateWeight")


class ControlGate:
    """Holds control requests until the last finished requests have left their batch.

    SGLang streams an answer one iteration before its request leaves the batch, so a
    client may send new weights to a scheduler that is not idle yet, which would end the
    process. Replays of the consistency check are aborted first. A scheduler that is
    busy with clients' requests, or paused, is left to SGLang's own rules at once.

    Args:
        on_new_weights: Called before the scheduler loads other weights.

    Attributes:
        epoch: Requests so far after which answers may differ.
    """

    def __init__(self, on_new_weights: Callable[[], None]) -> None:
        self._on_new_weights = on_new_weights
        self._held: list[Any] = []
        self._iterations = 0
        self.epoch = 0

    def admit(self, scheduler: Any, arrived: Iterable[Any]) -> Iterable[Any]:
        """Return what the scheduler is to process now; called once an iteration.

        Args:
            scheduler: SGLang's ``Scheduler``.
            arrived: What it has received; nothing overtakes what is held.
        """
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
        """Return whether the scheduler will be idle without further ado."""
        if scheduler._engine_paused or scheduler.is_fully_idle():
            return False
        grammars = scheduler.grammar_manager.grammar_queue
        running = (*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue)
        left = [req for req in (*running, *grammars) if not req.finished()]
        if any(not is_replay(req.rid) for req in left):
            return False
        if left and not self._iterations:
            scheduler.abort_request(AbortReq(rid=REPLAY_PREFIX))
        self._iterations += 1
        if self._iterations > MOST_ITERATIONS:
            logger.warning("VeriCache: control requests wait no longer for idleness")
        return self._iterations <= MOST_ITERATIONS
