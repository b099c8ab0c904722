"""How long forwards take, for the iteration model."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vericache_sglang.scheduling.iteration_model import Work


class End(NamedTuple):
    """The end of a forward.

    Attributes:
        at: In seconds, or an event behind it on the device.
        work: None: its time is not asked for.
        apart_s: Seconds up to then that are no forward's.
    """

    at: float | torch.cuda.Event
    work: Work | None
    apart_s: float


class ForwardTimes:
    """Times each forward from the end of the previous one to its own.

    Under SGLang's overlap schedule a forward is launched while the previous one runs,
    so that the time between two launches is that of the forward before them. A GPU
    therefore records an event behind every forward.

    Args:
        device: Runs the forwards.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._on_gpu = torch.device(device).type != "cpu"
        self._ends: deque[End] = deque()
        self._follows = False

    def interrupt(self) -> None:
        """Leave out the next forward, because other work comes before it."""
        self._follows = False

    def end(self, work: Work | None, apart_s: float) -> None:
        """Mark the end of a forward that was just launched; see ``End``."""
        at: float | torch.cuda.Event = time.perf_counter()
        if self._on_gpu:
            at = torch.cuda.Event(enable_timing=True)
            at.record()
        self._ends.append(End(at, work if self._follows else None, apart_s))
        self._follows = True

    def observed(self) -> Iterator[tuple[Work, float]]:
        """Yield the work and seconds of every forward that has ended, once."""
        while len(self._ends) > 1 and _passed(self._ends[1]):
            begin, end = self._ends.popleft(), self._ends[0]
            if end.work is not None:
                apart_s = end.apart_s - begin.apart_s
                yield end.work, _seconds(begin, end) - apart_s


def _passed(end: End) -> bool:
    return isinstance(end.at, float) or bool(end.at.query())


def _seconds(begin: End, end: End) -> float:
    if isinstance(begin.at, float) or isinstance(end.at, float):
        return float(end.at) - float(begin.at)  # type: ignore[arg-type]
    return float(begin.at.elapsed_time(end.at)) / 1e3
