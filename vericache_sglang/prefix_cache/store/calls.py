"""Calls into a storage backend that may hang or raise: bounded, and given up on."""

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
"""Calls past their time-out, above which no new one is made."""


class BoundedCalls:
    """Runs each call in a thread of its own and waits no longer than its time-out.

    A call that outlives it keeps its thread, and whatever it refers to, until it
    returns. The threads are daemons, which those of an executor are not: a process can
    always end. After several failures in a row no calls are made for a while: a dead
    Mooncake master answers each after 4.3 s. Thread-safe.

    Args:
        counters: Counts ``failed_calls`` and ``refused_calls``, and warns.
        pause_s: Seconds without calls; the first failure after that pauses again.
        failures: So many in a row pause the calls, >= 1.
        clock: Seconds that only grow.
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
            kind: What it is, for the one warning of its kind.
            job: The work; its result is not None. It may still run after this returned.
            timeout_s: Most seconds to wait.

        Returns:
            Its result; None where it raised, took too long or was not tried.
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
