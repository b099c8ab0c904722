"""Servers that answer at once, each with the machine to itself for a slice by turns.

A virtual machine's cores may change their speed by a factor of two every few seconds.
Passes that follow each other then differ more than the servers do: by 12 % (one
standard deviation) where the same passes in slices differ by 1 %. A server is stopped
while it is not its turn, and its answers are timed by a clock that stands still
meanwhile.

What a server measures itself includes that time: an operation that takes longer than a
slice, as compressing a long prompt does, seems as many times longer to it as there are
servers, and iterations, of which it takes medians, seem long now and then.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

SLICE_S = 0.1
"""Length of a slice, in seconds."""


class Stoppable(Protocol):
    """A server whose processes can be stopped."""

    def hold(self) -> None:
        """Stop them."""

    def go_on(self) -> None:
        """Let them run."""


class SliceClock:
    """Counts the seconds in which its server runs."""

    def __init__(self) -> None:
        # Of earlier slices, and since when this one lasts: other threads read both.
        self._slices: tuple[float, float | None] = (0.0, None)

    def start(self) -> None:
        """Begin a slice."""
        self._slices = self._slices[0], time.perf_counter()

    def stop(self) -> None:
        """End the slice that was begun."""
        self._slices = self.now(), None

    def now(self) -> float:
        """Return the seconds of all slices so far."""
        before, since = self._slices
        return before if since is None else before + time.perf_counter() - since


def in_slices(
    servers: Sequence[Stoppable], ask: Callable[[int, SliceClock], T]
) -> list[T]:
    """Ask all servers at once, and let one of them run at a time.

    Args:
        servers: All run before and afterwards.
        ask: Asks the server of an index, timed by its clock; in a thread of its own.

    Returns:
        What ``ask`` returned, by index.

    Raises:
        Exception: That of the first ``ask`` that failed.
    """
    clocks = [SliceClock() for _ in servers]
    with ThreadPoolExecutor(len(servers)) as pool:
        try:
            for server in servers:
                server.hold()
            runs = [pool.submit(ask, i, clock) for i, clock in enumerate(clocks)]
            while not all(run.done() for run in runs):
                for server, clock, run in zip(servers, clocks, runs, strict=True):
                    if run.done():
                        continue
                    clock.start()
                    server.go_on()
                    wait([run], timeout=SLICE_S)
                    server.hold()
                    clock.stop()
        finally:
            for server in servers:
                server.go_on()
    return [run.result() for run in runs]
