"""One thread that works through a bounded queue, and stops when it is told to."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from threading import Condition, Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")


class Background:
    """Runs jobs in the order they came, in a thread that starts with the first one.

    Not started earlier, so that a process may fork before it is used. Thread-safe.

    Args:
        name: Of the thread.
        most_waiting: Jobs that may wait, the running one not counted, >= 1.
    """

    def __init__(self, name: str, most_waiting: int) -> None:
        self._name = name
        self._most_waiting = most_waiting
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._busy = False
        self._closed = False

    def submit(self, job: Callable[[], ResultT]) -> Future[ResultT] | None:
        """Queue a job, at once.

        Returns:
            Its result or exception to come; None where the queue is full or closed.
        """
        future: Future[ResultT] = Future()
        with self._changed:
            if self._closed or len(self._jobs) >= self._most_waiting:
                return None
            self._jobs.append(lambda: _settle(job, future))
            if self._thread is None:
                self._thread = Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return future

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no job waits or runs; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._jobs and not self._busy, timeout_s
            )

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more jobs, and drain. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self.drain(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._busy = True
            job()
            # What it refers to (tensors of the caller) must not wait for the next job.
            del job


def _settle(job: Callable[[], ResultT], future: Future[ResultT]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except BaseException as error:  # noqa: BLE001 (whoever waits for it is told)
        future.set_exception(error)
