"""Calls into code of others that may hang or raise: bounded, and given up on."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_sglang.store.tally import Tally

ResultT = TypeVar("ResultT")


class Breaker:
    """Stops calls for a while after several failures in a row. Not thread-safe.

    A dead Mooncake master answers each call after 4.3 s: without this, every request
    would wait for that.

    Args:
        failures: So many in a row open it, >= 1.
        pause_s: Seconds it stays open; the first failure after that opens it again.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        failures: int = 3,
        pause_s: float = 5.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._most = failures
        self._pause_s = pause_s
        self._clock = clock
        self._in_a_row = 0
        self._closed_from = clock()

    def allows(self) -> bool:
        """Say whether a call may be made now."""
        return self._clock() >= self._closed_from

    def record(self, good: bool) -> None:
        """Take note of how a call went."""
        self._in_a_row = 0 if good else self._in_a_row + 1
        if self._in_a_row >= self._most:
            self._closed_from = self._clock() + self._pause_s


class BoundedCalls:
    """Runs each call in a thread of its own and waits for it so long and no longer.

    A call that outlives its time keeps its thread, and whatever it refers to, until it
    returns; at most ``most_stuck`` such threads exist. They are daemons: a process can
    always end. Thread-safe.

    Args:
        tally: Counts ``failed_calls`` and ``refused_calls``, and warns.
        breaker: When to make no calls at all.
        most_stuck: Calls past their time, above which no new one is made.
    """

    def __init__(self, tally: Tally, breaker: Breaker, most_stuck: int = 4) -> None:
        self._tally = tally
        self._breaker = breaker
        self._most_stuck = most_stuck
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
            allowed = self._breaker.allows() and self._stuck < self._most_stuck
        if not allowed:
            self._tally.add(refused_calls=1)
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
            self._breaker.record(error is None)
        if error is None:
            return future.result()
        self._tally.add(failed_calls=1)
        self._tally.warn(f"{kind} failed", repr(error))
        return None

    def _unstick(self, _: Future[ResultT]) -> None:
        with self._lock:
            self._stuck -= 1


def _run(job: Callable[[], ResultT], future: Future[ResultT]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # noqa: BLE001 (the waiting thread is told)
        future.set_exception(error)
