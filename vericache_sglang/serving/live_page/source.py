"""Where the page's readings come from: one question to the schedulers at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import VeriCacheError
from vericache_sglang.serving.live_page.reading import Reading, read_state

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    Read = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]

PATIENCE_S = 5.0
"""Seconds after which a viewer is told that the schedulers do not answer."""

FRESH_S = 0.5
"""Seconds for which viewers share an answer."""

SPAN_S = 10.0
"""Seconds over which tokens per second are averaged."""

LEAST_SPAN_S = 0.5
"""A shorter span says nothing: a round's tokens come at once."""


class NoAnswerError(VeriCacheError):
    """The schedulers have not answered in time."""


class TokenRate:
    """Tokens per second over the last looks at a counter."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, tokens: int, now: float) -> float | None:
        """Take note of a look.

        Args:
            tokens: The counter; it starts again where the process does.
            now: A monotonic clock's seconds.

        Returns:
            Tokens per second over at most ``SPAN_S``; None where the looks are too
            close together, or the last one is too long ago.
        """
        if self._seen and tokens < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, tokens))
        while now - self._seen[0][0] > SPAN_S:
            self._seen.popleft()
        then, before = self._seen[0]
        if now - then < LEAST_SPAN_S:
            return None
        return (tokens - before) / (now - then)


class Source:
    """Asks for every viewer together; a slow scheduler gets one question, not many.

    Args:
        read: Returns the internal state of every scheduler. It is never cancelled:
            SGLang would hand the late answer to whoever asks next.
        patience_s: How long a viewer waits, in seconds.
        fresh_s: How long an answer is shared, in seconds.
    """

    def __init__(
        self, read: Read, *, patience_s: float = PATIENCE_S, fresh_s: float = FRESH_S
    ) -> None:
        self._read = read
        self._patience_s = patience_s
        self._fresh_s = fresh_s
        self._asked: asyncio.Task[tuple[Reading, ...]] | None = None
        self._asked_at = 0.0
        self._rates: list[TokenRate] = []

    async def readings(self) -> tuple[Reading, ...]:
        """Return one reading per scheduler, at most ``fresh_s`` old when it was asked.

        Raises:
            NoAnswerError: There was no answer for ``patience_s``.
        """
        now = time.monotonic()
        asked = self._asked
        if asked is None or (asked.done() and now - self._asked_at >= self._fresh_s):
            asked = self._asked = asyncio.create_task(self._ask())
            self._asked_at = now
        done, _ = await asyncio.wait({asked}, timeout=self._patience_s)
        if not done:
            waited = time.monotonic() - self._asked_at
            raise NoAnswerError(
                f"The scheduler has not answered for {waited:.0f} seconds. "
                "It may be in a long prefill, or it may be stuck."
            )
        return asked.result()

    async def _ask(self) -> tuple[Reading, ...]:
        states = await self._read()
        now = time.monotonic()
        while len(self._rates) < len(states):
            self._rates.append(TokenRate())
        readings = []
        for state, rate in zip(states, self._rates, strict=False):
            reading = read_state(state)
            tokens_per_s = rate.note(reading.decoded, now)
            readings.append(replace(reading, tokens_per_s=tokens_per_s))
        return tuple(readings)
