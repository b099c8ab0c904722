"""One modelled server of a pool: its forwards, its link from the store, its rings."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.network import NetworkRings

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_sglang.planning.inter import Cluster
    from vericache_sglang.simulation.clock import Clock

PIECE_S = 0.1
"""Link time after which a load may be overtaken by a more urgent one, in seconds."""


@dataclass(order=True, slots=True)
class StoreLoad:
    """A load from the store; the most urgent one, then the oldest, is served first.

    Attributes:
        rank: 0 is the most urgent.
        serial: In the order of arrival.
        left_s: Link time that it still needs, in seconds.
        done: Called at its end.
        cancelled: Whether it is not needed any more.
    """

    rank: int
    serial: int
    left_s: float = field(compare=False)
    done: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)


class StoreLink:
    """The link from the store to one server: one load at a time, at the full rate.

    Args:
        clock: Simulated time.
        bytes_per_s: Bandwidth, > 0.

    Attributes:
        bytes_per_s: Bandwidth.
        busy_s: Link time used so far, in seconds.
    """

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy_s = 0.0
        self._clock = clock
        self._serial = count()
        self._loads: list[StoreLoad] = []
        self._served: StoreLoad | None = None

    def load(self, bytes_: float, rank: int, done: Callable[[], None]) -> StoreLoad:
        """Queue a load of ``bytes_`` >= 0."""
        added = StoreLoad(rank, next(self._serial), bytes_ / self.bytes_per_s, done)
        heapq.heappush(self._loads, added)
        if self._served is None:
            self._serve()
        return added

    def backlog_s(self, rank: int) -> float:
        """Return the link time that loads up to ``rank`` still need, in seconds."""
        served = [] if self._served is None else [self._served]
        return sum(
            each.left_s
            for each in (*served, *self._loads)
            if each.rank <= rank and not each.cancelled
        )

    def _serve(self) -> None:
        while self._loads and self._loads[0].cancelled:
            heapq.heappop(self._loads)
        self._served = heapq.heappop(self._loads) if self._loads else None
        if self._served is not None:
            piece = min(self._served.left_s, PIECE_S)
            self._clock.at(self._clock.now + piece, lambda: self._moved(piece))

    def _moved(self, seconds: float) -> None:
        load = self._served
        assert load is not None
        self.busy_s += seconds
        load.left_s -= seconds
        if load.left_s > 0:
            heapq.heappush(self._loads, load)
        self._serve()
        if load.left_s <= 0 and not load.cancelled:
            load.done()


class Instance:
    """One server: a forward after the other while it has rows.

    A forward reads the weights once and a full KV for each row, as in appendix A.2:
    draft KV is decompressed on arrival. Its arithmetic is not counted.

    Args:
        clock: Simulated time.
        cluster: Rates and sizes.
        bytes_per_s: Bandwidth of its link from the store.

    Attributes:
        link: Its link from the store.
        rings: Its admission.
        iteration_s: Mean time of a forward, in seconds.
        forwards: Forwards so far.
        rows: Rows of all forwards so far.
    """

    def __init__(self, clock: Clock, cluster: Cluster, bytes_per_s: float) -> None:
        self.link = StoreLink(clock, bytes_per_s)
        self.rings = NetworkRings(cluster.slots)
        self.iteration_s = Ewma(cluster.token_s(1), least=0.0, most=float("inf"))
        self.forwards = self.rows = 0
        self._clock = clock
        self._cluster = cluster
        self._rows: list[Callable[[], bool]] = []
        self._running = False

    def add(self, row: Callable[[], bool]) -> None:
        """Add a row to the next forward; ``row`` is called after each of its forwards.

        Args:
            row: Returns whether it takes part in the next forward too.
        """
        self._rows.append(row)
        if not self._running:
            self._running = True
            # Rows that are added at the same time run in the same forward.
            self._clock.at(self._clock.now, self._launch)

    def _launch(self) -> None:
        rows, self._rows = self._rows, []
        self._running = bool(rows)
        if rows:
            seconds = len(rows) * self._cluster.token_s(len(rows))
            self.iteration_s.observe(seconds)
            self.forwards += 1
            self.rows += len(rows)
            self._clock.at(self._clock.now + seconds, lambda: self._ran(rows))

    def _ran(self, rows: list[Callable[[], bool]]) -> None:
        kept = [row for row in rows if row()]
        self._rows = kept + self._rows
        self._launch()
