"""An asyncio client: streams every answer and records when its tokens arrived."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

LINE_BYTES = 1 << 24
"""Longest event: SGLang repeats the whole answer in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The client's record of one request. Times are seconds since its pass began.

    Attributes:
        sent: Send time; in an open loop, the scheduled send time.
        times: (time, output tokens so far) of every event with new tokens.
        ended: End time of the stream.
        ids: Output tokens.
        prompt_tokens: Prompt tokens, as counted by the server.
        cached_tokens: Prompt tokens found in the server's prefix cache.
        drafting: The server's speculation statistics; empty without VeriCache.
        error: Error message; "" for none.
    """

    sent: float
    times: tuple[tuple[float, int], ...] = ()
    ended: float = 0.0
    ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafting: dict[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Pass:
    """One system's answers to a list of requests.

    Attributes:
        answers: In the requests' order.
        seconds: From the first request sent to the last answer ended.
    """

    answers: tuple[Answer, ...]
    seconds: float


def closed_loop(
    url: str,
    requests: Sequence[dict[str, Any]],
    clients: int,
    answered: Callable[[], None],
    timeout: float,
) -> Pass:
    """Answer ``requests`` with ``clients`` at once, each sending one after another.

    Args:
        requests: Bodies of ``POST /generate``.
        clients: Maximum concurrent requests, >= 1.
        answered: Called after every answer.
        timeout: Timeout of one answer, in seconds.
    """
    return asyncio.run(_closed(_Asker(url, answered, timeout), requests, clients))


def answered(
    url: str,
    requests: Sequence[dict[str, Any]],
    clients: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Pass:
    """Answer ``requests`` as ``closed_loop`` does, within an hour each.

    Args:
        url: See ``closed_loop``, also for the other arguments.
        clock: Tells the seconds that answers are timed in.

    Raises:
        RuntimeError: A request failed.
    """
    asker = _Asker(url, lambda: None, 3600.0, clock)
    done = asyncio.run(_closed(asker, requests, clients))
    failed = [answer.error for answer in done.answers if answer.error]
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return done


def open_loop(
    url: str,
    requests: Sequence[dict[str, Any]],
    arrivals: Sequence[float],
    answered: Callable[[], None],
    timeout: float,
) -> Pass:
    """Answer ``requests``, each sent at its time (open loop).

    Args:
        requests: Bodies of ``POST /generate``.
        arrivals: Seconds after the start, as many as requests.
        answered: Called after every answer.
        timeout: Most seconds of one answer.
    """
    return asyncio.run(_open(_Asker(url, answered, timeout), requests, arrivals))


def replay(
    url: str,
    requests: Sequence[dict[str, Any]],
    sessions: Sequence[Sequence[tuple[int, float]]],
    starts: Sequence[float],
    answered: Callable[[], None],
    timeout: float,
) -> Pass:
    """Replay recorded sessions: a request follows its session's previous answer.

    Args:
        requests: Bodies of ``POST /generate``.
        sessions: Of each, its (request's index, seconds after the previous answer) in
            order; every request is in one session.
        starts: Seconds after which each session begins; as many as sessions.
        answered: Called after every answer.
        timeout: Most seconds of one answer.
    """
    asker = _Asker(url, answered, timeout)
    return asyncio.run(_replay(asker, requests, sessions, starts))


class _Asker:
    def __init__(
        self,
        url: str,
        answered: Callable[[], None],
        timeout: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._url = f"{url}/generate"
        self._answered = answered
        self._timeout = timeout
        self._clock = clock
        self._began = clock()

    def begin(self) -> None:
        """Count time from now on."""
        self._began = self._clock()

    def session(self) -> aiohttp.ClientSession:
        return open_session(self._timeout)

    def now(self) -> float:
        return self._clock() - self._began

    async def ask(
        self, session: aiohttp.ClientSession, body: dict[str, Any], sent: float
    ) -> Answer:
        times: list[tuple[float, int]] = []
        last: dict[str, Any] = {}
        error = ""
        try:
            async with session.post(self._url, json={**body, "stream": True}) as reply:
                if reply.status != 200:
                    error = f"HTTP {reply.status}: {(await reply.text())[:300]}"
                async for event in events_of(reply):
                    if "error" in event:
                        error = str(event["error"])[:300]
                        break
                    last = event
                    tokens = event["meta_info"]["completion_tokens"]
                    if tokens > (times[-1][1] if times else 0):
                        times.append((self.now(), tokens))
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"[:300]
        self._answered()
        return _answer(sent, times, self.now(), last, error)


def open_session(timeout: float) -> aiohttp.ClientSession:
    """Open a session for any number of connections, each for one request.

    Args:
        timeout: Most seconds of one answer.
    """
    return aiohttp.ClientSession(
        # A server closes idle connections (SGLang's after 5 s): a request that is sent
        # at that moment on one of them would have no answer.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=timeout),
        read_bufsize=LINE_BYTES,
    )


async def events_of(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a ``/generate`` stream."""
    async for line in reply.content:
        text = line.strip().removeprefix(b"data: ")
        if text.startswith(b"{"):
            yield json.loads(text)


def _answer(
    sent: float,
    times: list[tuple[float, int]],
    ended: float,
    last: dict[str, Any],
    error: str,
) -> Answer:
    info = last.get("meta_info", {})
    finish = info.get("finish_reason")
    if not error and not finish:
        error = "the stream ended without a finish reason"
    elif not error and finish.get("type") == "abort":
        error = f"aborted: {finish.get('message', '')}"[:300]
    return Answer(
        sent=sent,
        times=tuple(times),
        ended=ended,
        ids=tuple(last.get("output_ids", ())),
        prompt_tokens=info.get("prompt_tokens", 0),
        cached_tokens=info.get("cached_tokens", 0),
        drafting=info.get("vericache"),
        error=error,
    )


async def _closed(
    asker: _Asker, requests: Sequence[dict[str, Any]], clients: int
) -> Pass:
    waiting = iter(enumerate(requests))
    answers: dict[int, Answer] = {}

    async def client(session: aiohttp.ClientSession) -> None:
        for i, body in waiting:
            answers[i] = await asker.ask(session, body, asker.now())

    async with asker.session() as session:
        asker.begin()
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return _pass([answers[i] for i in range(len(requests))])


async def _open(
    asker: _Asker, requests: Sequence[dict[str, Any]], arrivals: Sequence[float]
) -> Pass:
    async def arrive(
        session: aiohttp.ClientSession, body: dict[str, Any], at: float
    ) -> Answer:
        await asyncio.sleep(at - asker.now())
        # A client that is late itself makes its request wait, so `at` counts.
        return await asker.ask(session, body, at)

    async with asker.session() as session:
        asker.begin()
        pairs = zip(requests, arrivals, strict=True)
        asked = [arrive(session, body, at) for body, at in pairs]
        return _pass(await asyncio.gather(*asked))


async def _replay(
    asker: _Asker,
    requests: Sequence[dict[str, Any]],
    sessions: Sequence[Sequence[tuple[int, float]]],
    starts: Sequence[float],
) -> Pass:
    answers: dict[int, Answer] = {}

    async def play(
        session: aiohttp.ClientSession, turns: Sequence[tuple[int, float]], at: float
    ) -> None:
        for i, gap in turns:
            at += gap
            await asyncio.sleep(at - asker.now())
            answers[i] = await asker.ask(session, requests[i], at)
            at = answers[i].ended

    async with asker.session() as session:
        asker.begin()
        pairs = zip(sessions, starts, strict=True)
        await asyncio.gather(*(play(session, turns, at) for turns, at in pairs))
    return _pass([answers[i] for i in range(len(requests))])


def _pass(answers: Sequence[Answer]) -> Pass:
    began = min(answer.sent for answer in answers)
    return Pass(tuple(answers), max(answer.ended for answer in answers) - began)
