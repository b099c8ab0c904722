"""Calls into a storage backend that may hang or raise, with time-outs and pauses."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_sglang.prefix_cache.store.counters import StoreCounters

ResultT = TypeVar("ResultT")

MOST_STUCK = 4
"""Calls running past their time-out at which new ones are refused."""


class BoundedCalls:
    """Runs each call in its own thread and waits no longer than its time-out.

    A call that exceeds the time-out keeps its thread, and the objects it refers to,
    until it returns. The threads are daemons, unlike those of an executor, so that the
    process can always exit. Consecutive failures suspend calls for a while: with a dead
    Mooncake master each takes 4.3 s to fail. Thread-safe.

    Args:
        counters: Counts ``failed_calls`` and ``refused_calls``, and warns.
        pause_s: Seconds of a suspension; a failure right after it starts another one.
        failures: Consecutive failures that suspend calls, >= 1.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        counters: StoreCounters,
        pause_s: float = 5.0,
        failures: int = 3,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._counters = counters
        self._pause_s = pause_s
        self._most_failures = failures
        self._clock = clock
        self._failures = 0
        self._paused_until = clock()
        self._stuck = 0
        self._lock = Lock()

    def call(
        self, kind: str, job: Callable[[], ResultT], timeout_s: float
    ) -> ResultT | None:
        """Run a job, never raising.

        Args:
            kind: Kind of call; each kind is warned about once.
            job: The call; must not return None. It may still run after this returns.
            timeout_s: Most seconds to wait.

        Returns:
            Its result; None if it raised, timed out or was refused.
        """
        with self._lock:
            allowed = self._clock() >= self._paused_until and self._stuck < MOST_STUCK
        if not allowed:
            self._counters.add(refused_calls=1)
            return None
        future: Future[ResultT] = Future()
        Thread(target=_run, args=(job, future), name="store-call", daemon=True).start()
        try:
            error = future.exception(timeout_s)
        except FutureTimeoutError:
            error = TimeoutError(f"no answer in {timeout_s:.1f} s")
            with self._lock:
                self._stuck += 1
            future.add_done_callback(self._unstick)
        with self._lock:
            self._failures = 0 if error is None else self._failures + 1
            if self._failures >= self._most_failures:
                self._paused_until = self._clock() + self._pause_s
        if error is None:
            return future.result()
        self._counters.add(failed_calls=1)
        self._counters.warn(f"{kind} failed", repr(error))
        return None

    def _unstick(self, _: Future[ResultT]) -> None:
        with self._lock:
            self._stuck -= 1


def _run(job: Callable[[], ResultT], future: Future[ResultT]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # noqa: BLE001 (the waiting thread is told)
        future.set_exception(error)
