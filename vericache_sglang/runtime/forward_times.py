"""How long forwards take, for the iteration model."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vericache_sglang.scheduling.iteration_model import Work


class End(NamedTuple):
    """The end of a forward.

    Attributes:
        at: Seconds; on a GPU an event behind it.
        work: None: its time is not asked for.
        apart_s: Seconds up to then that are no forward's.
    """

    at: Any
    work: Work | Prefill | None
    apart_s: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """A forward that prefills.

    Attributes:
        tokens: Of the new prompts that it completes, those included of which the prefix
            cache had the KV.
    """

    tokens: int


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

    def end(self, work: Work | Prefill | None, apart_s: float) -> None:
        """Mark the end of a forward that was just launched; see ``End``."""
        at: Any
        if self._on_gpu:
            at = torch.cuda.Event(enable_timing=True)
            at.record()
        else:
            at = time.perf_counter()
        self._ends.append(End(at, work if self._follows else None, apart_s))
        self._follows = True

    def observed(self) -> Iterator[tuple[Work | Prefill, float]]:
        """Yield the work and seconds of every forward that has ended, once."""
        while len(self._ends) > 1:
            begin, end = self._ends[0], self._ends[1]
            if self._on_gpu and not end.at.query():
                return
            self._ends.popleft()
            if end.work is not None:
                apart_s = end.apart_s - begin.apart_s
                yield end.work, self._seconds(begin.at, end.at) - apart_s

    def _seconds(self, begin: Any, end: Any) -> float:
        if self._on_gpu:
            return float(begin.elapsed_time(end)) / 1e3
        return float(end - begin)
