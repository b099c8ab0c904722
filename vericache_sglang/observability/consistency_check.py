"""Online consistency check: finished requests, replayed with speculation disabled."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from vericache_sglang.observability.request_stats import KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vericache_sglang.observability.guard import Guard

logger = logging.getLogger(__name__)

NAME = "online consistency check"
"""Name of the check in logs."""

REPLAY_PREFIX = "vericache-check-"
"""Prefix of the request ids of replays."""

HEALTH_PREFIX = "HEALTH_CHECK"
"""Prefix of the ids of SGLang's health checks, which count as an idle server."""

MOST_PENDING = 64
"""Most requests that wait for a check; older ones are dropped first."""

MOST_ATTEMPTS = 8
"""Aborted replays of one request after which its check is dropped."""

POLL_S = 0.05
"""Seconds between two polls for an idle server, or for a reason to abort a replay."""

EPOCH_S = 1.0
"""Seconds between two reads of the epoch while the server is busy."""

_NOT_TOKENS = (
    *("image_data", "video_data", "audio_data", "input_embeds"),
    *("positional_embed_overrides", "session_params", "session_id"),
)
"""Request fields of inputs other than tokens."""


def is_replay(rid: str) -> bool:
    """Return whether a request is a replay, which bypasses the prefix cache."""
    return rid.startswith(REPLAY_PREFIX)


@dataclass(slots=True)
class FinishedRequest:
    """A finished request that waits for its check.

    Attributes:
        rid: Request id.
        state: SGLang's ``ReqState``, with the request and its output token ids.
        finish: Finish reason sent to the client.
        epoch: Last read count of control requests that may change answers; None before
            the first read.
        attempts: Replays aborted for other requests.
    """

    rid: str
    state: Any
    finish: Mapping[str, Any]
    epoch: int | None
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which two answers differ.

    Attributes:
        position: Index of the first differing output token; the length of the output
            if only the finish reasons differ.
        served: Token sent to the client at ``position``; None past its end.
        full: Token of autoregressive decoding at ``position``; None past its end.
        margin: Distance of the two largest logits of autoregressive decoding at
            ``position``; None past its end.
    """

    position: int
    served: int | None
    full: int | None
    margin: float | None

    def __str__(self) -> str:
        served = "the end" if self.served is None else self.served
        full = "the end" if self.full is None else self.full
        margin = "no" if self.margin is None else f"{self.margin:.3g}"
        return (
            f"output token {self.position} is {served}, the full KV gives {full} by "
            f"{margin} logits"
        )


class ConsistencyCheck:
    """Replays a sample of the finished greedy requests while the server is idle.

    A client of SGLang's tokenizer manager, in the process of the HTTP server. One
    request is replayed at a time. The replay is aborted and retried later when another
    request arrives, or when an update of weights or adapters waits for the running
    requests.

    Args:
        rate: Sampled share of the requests, in [0, 1].
        seed: Seed of the sample.
        manager: SGLang's ``TokenizerManager``.
        guard: Catches and logs exceptions, so that they do not reach SGLang's loop.
    """

    def __init__(self, rate: float, seed: int, manager: Any, guard: Guard) -> None:
        self._rate = rate
        self._seed = seed
        self._manager = manager
        self._guard = guard
        self._pending: deque[FinishedRequest] = deque()
        self._task: asyncio.Task[None] | None = None
        self._running = False
        self._epoch: int | None = None
        self._read_at = 0.0
        self._numbers = count()
        self._checks = self._mismatches = self._dropped = 0
        self.changed: Callable[[], None] = lambda: None
        """Callback for a changed ``report``."""

    def report(self) -> dict[str, int]:
        """Return the figures with the source "check" in the table."""
        return {
            "consistency_checks": self._checks,
            "consistency_mismatches": self._mismatches,
            "consistency_pending": len(self._pending) + self._running,
            "consistency_dropped": self._dropped,
        }

    def samples(self, rid: str) -> bool:
        """Return whether a request is in the sample; depends on id and seed alone."""
        text = f"{self._seed} {rid}".encode()
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        return drawn < self._rate * 2**64

    def finished(self, state: Any, meta_info: Mapping[str, Any]) -> None:
        """Queue a finished request if it is in the sample and can be replayed.

        Called by the hook on the tokenizer manager for every chunk of an answer, before
        its tokens are added.

        Args:
            state: SGLang's ``ReqState``.
            meta_info: The client's ``meta_info``: id, finish reason and our statistics.
        """
        if meta_info["finish_reason"] is not None:
            self._guard.call(NAME, lambda: self._note(state, meta_info), None)

    def _note(self, state: Any, meta_info: Mapping[str, Any]) -> None:
        rid: str = meta_info["id"]
        if (
            is_replay(rid)
            or not self.samples(rid)
            or not self.repeatable(state.obj, meta_info)
        ):
            return
        finish = meta_info["finish_reason"]
        self._pending.append(FinishedRequest(rid, state, finish, self._epoch))
        if len(self._pending) > MOST_PENDING:
            self._pending.popleft()
            self._dropped += 1
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        self.changed()

    def repeatable(self, request: Any, meta_info: Mapping[str, Any]) -> bool:
        """Return whether an answer used drafts and must be reproducible.

        Only greedy answers are reproducible. Aborted requests are excluded, and so are
        those with inputs other than tokens: a session, an image, embeddings.

        Args:
            request: SGLang's ``GenerateReqInput`` of one prompt.
            meta_info: See ``finished``.
        """
        stats = meta_info.get(KEY)
        if not stats or not stats["cycles"]:
            return False
        if any(getattr(request, name) is not None for name in _NOT_TOKENS):
            return False
        return meta_info["finish_reason"]["type"] != "abort" and self._greedy(request)

    def _greedy(self, request: Any) -> bool:
        preferred = self._manager.preferred_sampling_params or {}
        params = {**preferred, **request.sampling_params}
        return bool(self._manager.sampling_params_class(**params).top_k == 1)

    # -- replays --------------------------------------------------------------------

    async def _run(self) -> None:
        """Check the queued requests one by one while the server is idle."""
        while self._pending and not self._guard.is_off(NAME):
            try:
                await self._step()
            except Exception:  # noqa: BLE001  # must not end SGLang's loop
                self._guard.failed(NAME)
                await asyncio.sleep(POLL_S)

    async def _step(self) -> None:
        """Wait for ``POLL_S``, or check one answer."""
        if self._busy() and time.monotonic() - self._read_at < EPOCH_S:
            await asyncio.sleep(POLL_S)
            return
        await self._read_epoch()
        if self._busy():
            return
        answer = self._pending.popleft()
        self._running = True
        try:
            await self._check(answer)
        except Exception as error:  # noqa: BLE001  # SGLang refuses the replay
            self._dropped += 1
            logger.debug("VeriCache: no check of %s: %r", answer.rid, error)
        finally:
            self._running = False
        self.changed()

    async def _check(self, answer: FinishedRequest) -> None:
        if answer.epoch != self._epoch:
            self._dropped += 1
            return
        reply = await self._replay(answer)
        if reply is None:
            self._pending.appendleft(answer)
            return
        finish = reply["meta_info"]["finish_reason"]
        if finish["type"] == "abort":
            answer.attempts += 1
            self._dropped += answer.attempts == MOST_ATTEMPTS
            if answer.attempts < MOST_ATTEMPTS:
                self._pending.appendleft(answer)
            return
        await self._read_epoch()
        if answer.epoch != self._epoch:
            self._dropped += 1
            return
        self._checks += 1
        top = reply["meta_info"]["output_top_logprobs"]
        margins = [best[0] - second[0] for best, second in top]
        found = compare(
            *(answer.state.output_ids, answer.finish),
            *(reply["output_ids"], finish, margins),
        )
        if found is not None:
            self._mismatches += 1
            prompt = reply["meta_info"]["prompt_tokens"]
            logger.error(
                "VeriCache: online consistency check of %s: %s; prompt %d tokens",
                *(answer.rid, found, prompt),
            )

    async def _read_epoch(self) -> None:
        """Read the epoch from the schedulers."""
        states = await self._manager.get_internal_state()
        self._epoch = sum(state[KEY]["answer_epoch"] for state in states)
        self._read_at = time.monotonic()
        for answer in self._pending:
            if answer.epoch is None:
                answer.epoch = self._epoch

    async def _replay(self, answer: FinishedRequest) -> Any:
        """Return the reply to a replay; None if it was aborted."""
        rid = f"{REPLAY_PREFIX}{next(self._numbers)}"
        task = asyncio.create_task(self._ask(replay_of(answer.state.obj, rid)))
        while not task.done():
            await asyncio.wait({task}, timeout=POLL_S)
            if not task.done() and self._busy():
                task.cancel()  # SGLang then aborts it
        return None if task.cancelled() else task.result()

    async def _ask(self, request: Any) -> Any:
        reply = None
        async for each in self._manager.generate_request(request):
            reply = each
        return reply

    def _busy(self) -> bool:
        """Return whether a client's request runs, or an update waits or runs."""
        ours = (REPLAY_PREFIX, HEALTH_PREFIX)
        if any(not rid.startswith(ours) for rid in self._manager.rid_to_state):
            return True
        # SGLang's lock does not publish its waiters (0.5.21).
        lock = self._manager.model_update_lock
        updates = lock._waiting_writers or lock._writer_active
        return bool(updates or self._manager.lora_update_lock.locked())


def replay_of(request: Any, rid: str) -> Any:
    """Return a copy of a request with speculation disabled.

    Args:
        request: SGLang's ``GenerateReqInput`` of one prompt.
        rid: Id of the replay, also its cache key, so that it matches no cached prefix.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    params = dict(request.sampling_params)
    custom = {
        **(params.get("custom_params") or {}),
        KEY: {"enabled": False, "inner": False},
    }
    return GenerateReqInput(
        rid=rid,
        text=request.text,
        input_ids=request.input_ids,
        sampling_params={**params, "n": 1, "custom_params": custom},
        return_logprob=True,
        logprob_start_len=-1,
        top_logprobs_num=2,
        lora_path=request.lora_path,
        custom_logit_processor=request.custom_logit_processor,
        require_reasoning=request.require_reasoning,
        max_thinking_tokens=request.max_thinking_tokens,
        extra_key=rid,
        log_metrics=False,
        no_logs=True,
    )


def compare(
    served: Sequence[int],
    served_finish: Mapping[str, Any],
    full: Sequence[int],
    full_finish: Mapping[str, Any],
    margins: Sequence[float],
) -> Difference | None:
    """Compare an answer with its replay.

    Args:
        served: Output token ids the client was sent.
        served_finish: Finish reason the client was sent.
        full: Output token ids of the replay.
        full_finish: Finish reason of the replay.
        margins: For each token of ``full``, the distance of the two largest logits.

    Returns:
        The first difference, or None if tokens and finish reason are the same.
    """
    both = zip(served, full, strict=False)
    same = min(len(served), len(full))
    position = next((i for i, (ours, one) in enumerate(both) if ours != one), same)
    if position == len(served) == len(full) and served_finish == full_finish:
        return None
    return Difference(
        position,
        served[position] if position < len(served) else None,
        full[position] if position < len(full) else None,
        margins[position] if position < len(full) else None,
    )
