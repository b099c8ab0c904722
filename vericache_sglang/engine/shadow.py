"""Live proof: a sample of finished requests is decoded again plainly and compared."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput

from vericache_sglang.engine.shadow_inputs import (
    brings_weights,
    may_change_answers,
    needs_quiet,
)
from vericache_sglang.engine.shadow_record import (
    Served,
    compare,
    repeatable,
    served_from,
    was_aborted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

RID_PREFIX = "vericache-shadow-"
"""Begins the name of every shadow request, as the server's logs show it."""

MOST_PENDING = 64
"""Requests remembered for a check; a busy server keeps the latest."""


@dataclass(slots=True)
class Run:
    """The one shadow request that is decoded now.

    Attributes:
        served: What it repeats.
        req: SGLang's ``Req``.
        leaving: It was told to end before its time.
    """

    served: Served
    req: Any
    leaving: bool = False


class Shadow:
    """Repeats finished requests while the server is idle; counts wrong answers.

    A shadow is an ordinary request of the scheduler, decoded plainly, alone at first;
    requests that arrive meanwhile are served beside it, and it ends, to be tried again,
    once one of them has to wait. It neither reads the prefix tree nor adds to it, so a
    wrong prefix of ours cannot hide, and nothing of it reaches a client (patches:
    managers_scheduler_shadow, managers_output_streamer; ``TieredCache``).

    Args:
        rate: Share of the requests that is checked, 0 to 1.
        seed: Chooses which.
        on_new_weights: Called before the scheduler loads other weights.
    """

    def __init__(
        self, rate: float, seed: int, on_new_weights: Callable[[], None] | None = None
    ) -> None:
        self._on_new_weights = on_new_weights
        self._rate = rate
        self._seed = seed
        self._pending: deque[Served] = deque()
        self._run: Run | None = None
        self._held: list[Any] = []
        self._numbers = count()
        self._checks = 0
        self._mismatches = 0
        self._dropped = 0

    def report(self) -> dict[str, int]:
        """Return the checks made, wrong answers, and what waits for a check.

        A check that could not be made counts as dropped: pushed out by later requests,
        overtaken by new weights, or aborted by an operator.
        """
        return {
            "shadow_checks": self._checks,
            "shadow_mismatches": self._mismatches,
            "shadow_pending": len(self._pending) + (self._run is not None),
            "shadow_dropped": self._dropped,
        }

    def note_finished(self, req: Any) -> None:
        """Remember a finished request if it is in the sample.

        Called before SGLang releases its KV.

        Args:
            req: SGLang's ``Req``; ``finished_reason`` is set.
        """
        if self._run is not None and req is self._run.req:
            req.skip_radix_cache_insert = True
        elif self._rate and repeatable(req) and self.samples(req.rid):
            self._remember(served_from(req))

    def samples(self, rid: str) -> bool:
        """Say whether a request is in the sample; the same one always is."""
        text = f"{self._seed} {rid}".encode()
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        return drawn < self._rate * 2**64

    def _remember(self, served: Served) -> None:
        self._pending.append(served)
        if len(self._pending) > MOST_PENDING:
            self._pending.popleft()
            self._dropped += 1

    # -- called by the hooks on the scheduler -------------------------------------

    def inputs(self, scheduler: Any, arrived: Iterable[Any]) -> Iterable[Any]:
        """Look after the running shadow; called once per scheduler iteration.

        Args:
            scheduler: SGLang's ``Scheduler``.
            arrived: What it has received.

        Returns:
            What it is to process now. While a shadow has to leave first, this is
            nothing, and later all of it in order. The same holds for requests that
            have been answered and are still in a batch: their client may send new
            weights at once, and SGLang, not yet idle, would end the process.
        """
        if self._run is not None:
            self._look_after(scheduler, self._run)
        if self._held or any(needs_quiet(each) for each in arrived):
            self._held.extend(arrived)
            if self._leaving(scheduler):
                return ()
            arrived, self._held = self._held, []
        if self._on_new_weights and any(brings_weights(each) for each in arrived):
            self._on_new_weights()
        if self._pending and any(may_change_answers(each) for each in arrived):
            self._dropped += len(self._pending)
            self._pending.clear()
        return arrived

    def start(self, scheduler: Any) -> bool:
        """Begin a check; called where SGLang, idle and in order, would go to sleep.

        Args:
            scheduler: SGLang's ``Scheduler``.

        Returns:
            Whether there is something to do, so that it must not sleep.
        """
        if self._run is not None:
            self._look_after(scheduler, self._run)
        if self._held:
            return True
        # Somebody waits for the server to be idle.
        flushing = scheduler.flush_wrapper._pending is not None
        if not self._pending or flushing or not scheduler.is_fully_idle():
            return False
        served = self._pending.popleft()
        rid = f"{RID_PREFIX}{next(self._numbers)}"
        scheduler.handle_generate_request(_ask_again(served, rid))
        queues = (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue)
        found = [req for queue in queues for req in queue if req.rid == rid]
        if not found:
            self._dropped += 1
            return True
        (req,) = found
        # Read by the hooks on the prefix tree and on the streamer.
        req.vericache_shadow = True
        req.time_stats.enable_metrics = False
        self._run = Run(served, req)
        return True

    # -- the running shadow -------------------------------------------------------

    def _look_after(self, scheduler: Any, run: Run) -> None:
        """Take the result, or make room for requests that were passed over."""
        if run.req.finished():
            self._conclude(run)
        elif scheduler.is_fully_idle():
            self._end_early(run)  # it was taken out of a queue
        elif any(req is not run.req for req in scheduler.waiting_queue):
            self._withdraw(scheduler, run)

    def _withdraw(self, scheduler: Any, run: Run) -> None:
        """End the shadow at SGLang's next chance, or at once if it has not begun."""
        if run.leaving:
            return
        run.leaving = True
        queued = any(req is run.req for req in scheduler.waiting_queue)
        scheduler.abort_request(AbortReq(rid=run.req.rid))
        if queued:
            self._end_early(run)

    def _leaving(self, scheduler: Any) -> bool:
        """Have the shadow leave; say whether only ended requests are in the way."""
        if self._run is not None:
            self._withdraw(scheduler, self._run)
        if self._run is not None:
            return True
        others = (*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue)
        busy = any(not req.finished() for req in others)
        halted = busy or scheduler._engine_paused
        return not halted and not scheduler.is_fully_idle()

    def _end_early(self, run: Run) -> None:
        """Put a check off if that was our wish, else drop it."""
        self._run = None
        if run.leaving:
            self._pending.appendleft(run.served)
        else:
            self._dropped += 1

    def _conclude(self, run: Run) -> None:
        """Compare the two answers."""
        if was_aborted(run.req):
            self._end_early(run)
            return
        self._run = None
        self._checks += 1
        finish = run.req.finished_reason.to_json()
        top = run.req.logprob.output_top_logprobs_val
        found = compare(run.served, run.req.output_ids_through_stop, finish, top)
        if found is None:
            return
        self._mismatches += 1
        logger.error(
            "VeriCache: shadow check of %s: output token %d is %s, the full KV gives "
            "%s by %s logits; prompt %d tokens",
            run.served.rid,
            found.position,
            "the end" if found.served is None else found.served,
            "the end" if found.full is None else found.full,
            "no" if found.margin is None else f"{found.margin:.3g}",
            len(run.served.prompt),
        )


def _ask_again(served: Served, rid: str) -> TokenizedGenerateReqInput:
    """Return the request for a plain repetition that shares no cached prefix."""
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=served.prompt,
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=served.params,
        return_logprob=True,
        logprob_start_len=-1,
        top_logprobs_num=2,
        token_ids_logprob=None,
        stream=False,
        lora_id=served.lora_id,
        custom_logit_processor=served.custom_logit_processor,
        require_reasoning=served.require_reasoning,
        extra_key=rid,
        http_worker_ipc=served.ipc,
    )
