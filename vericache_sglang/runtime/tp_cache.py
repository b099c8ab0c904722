"""Tensor-parallel prefix cache: all ranks match, keep and drop the same segments.

Ranks hold different KV heads of the same segments. What differs between them is the
clock, the free host memory, the speed and progress of the store, and whether a copy is
corrupt. All but the last is in the message with which every iteration begins.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from vericache_sglang.prefix_cache.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.kv.host_pages import HostPagePool
    from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments
    from vericache_sglang.runtime.tp_sync import TensorParallelSync

NOW, PACE, ROOM = range(3)
STORE = slice(3, None)
"""Index of each value of ``tell``; what concerns the store is last."""


class TensorParallelCache(Ranks):
    """See ``Ranks``; rank 0's clock and measurements, the least of what ranks have.

    Args:
        page_pool: This rank's host memory.
    """

    def __init__(self, tp_sync: TensorParallelSync, page_pool: HostPagePool) -> None:
        super().__init__(tp_sync.estimates)
        self._tp_sync = tp_sync
        self._page_pool = page_pool
        self._now_s, self._pace = 0.0, inf
        self.rank, self.alone = tp_sync.rank, tp_sync.alone

    def tell(self, stored: StoredSegments | None) -> list[float]:
        """Return what this rank knows, for the message that begins an iteration."""
        if self.alone:
            return []
        mine = [super().now(), super().store_s_per_byte(stored), self._room]
        return [*mine, *(() if stored is None else stored.tell())]

    def receive(
        self, rows: Sequence[Sequence[float]], stored: StoredSegments | None
    ) -> None:
        """Take over what all ranks agree on.

        Args:
            rows: ``tell`` of every rank, in rank order.
            stored: Segments in the store; None without a store.

        Raises:
            InvariantError: The ranks fetch different segments from the store.
        """
        if self.alone:
            return
        self._now_s, self._pace = rows[0][NOW], rows[0][PACE]
        self._limit([row[ROOM] for row in rows])
        if stored is not None:
            stored.receive([row[STORE] for row in rows])

    def now(self) -> float:
        """See ``Ranks.now``; rank 0's time at the begin of the iteration."""
        return super().now() if self.alone else self._now_s

    def store_s_per_byte(self, stored: StoredSegments | None) -> float:
        """See ``Ranks.store_s_per_byte``; measured by rank 0."""
        return super().store_s_per_byte(stored) if self.alone else self._pace

    def agree_on_room(self) -> None:
        """See ``Ranks.agree_on_room``; blocks on all ranks."""
        if not self.alone:
            self._limit([row[0] for row in self._tp_sync.gather([self._room])])

    def every(self, value: int) -> list[int]:
        """See ``Ranks.every``; blocks on all ranks."""
        return [int(row[0]) for row in self._tp_sync.gather([value])]

    def fail(self) -> None:
        """See ``Ranks.fail``."""
        self._tp_sync.expected = not self.alone
        self._tp_sync.fail()

    @property
    def _room(self) -> float:
        return float(self._page_pool.size - self._page_pool.used_bytes)

    def _limit(self, rooms: Sequence[float]) -> None:
        self._page_pool.limit(int(min(rooms)))
