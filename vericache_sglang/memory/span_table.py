"""Which bytes of an arena are whose; finds room, and makes it by moving."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.free_spans import FreeSpans, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Taken(Span):
    """A span that is somebody's.

    Attributes:
        holds: How often it is held; above 0 it is not moved.
    """

    __slots__ = ("holds",)

    def __init__(self, start: int, size: int) -> None:
        super().__init__(start, size)
        self.holds = 0


class SpanTable:
    """Taken and free spans that cover ``size`` bytes without gap or overlap.

    Free neighbours are always one span. Knows sizes, never contents.

    Args:
        size: Bytes, a multiple of ``GRAIN``.
        copy: Moves the bytes of a taken span to another first byte, which may lie
            within the span; called before the span's ``start`` changes.

    Attributes:
        free_bytes: Bytes of all free spans.
        moved_bytes: Bytes moved so far.
    """

    def __init__(self, size: int, copy: Callable[[Taken, int], None]) -> None:
        self.size = size
        self.free_bytes = 0
        self.moved_bytes = 0
        self._copy = copy
        self._free = FreeSpans()
        self._starts: dict[int, Span] = {}
        self._ends: dict[int, Span] = {}
        if size:
            self._enter_free(0, size)

    def has(self, span: Taken) -> bool:
        """Say whether a taken span is one of the table's."""
        return self._starts.get(span.start) is span

    def fill(self, hole: Span, span: Taken) -> None:
        """Take one end of a free span: ``span`` lies there."""
        self._forget(hole)
        self._enter(span)
        for start, end in ((hole.start, span.start), (span.end, hole.end)):
            if start < end:
                self._enter_free(start, end)

    def free(self, span: Taken) -> None:
        """Make a taken span free."""
        self._forget(span)
        self._enter_free(span.start, span.end)

    def cut(self, span: Taken, size: int) -> None:
        """Free the beginning of a taken span; its last ``size`` bytes stay."""
        start, end = span.start, span.end
        self._forget(span)
        span.start, span.size = end - size, size
        self._enter(span)
        if start < span.start:
            self._enter_free(start, span.start)

    def has_hole(self, size: int) -> bool:
        """Say whether a free span is large enough as it is; O(1), as ``hole``."""
        return self._free.find(size) is not None

    def hole(self, size: int) -> Span | None:
        """Return a free span of at least ``size`` bytes, moving what may be moved.

        Args:
            size: A multiple of ``GRAIN``, >= ``GRAIN``.

        Returns:
            None where fewer bytes are free, or held spans lie between them. O(1)
            where a span is large enough as it is, else O(spans) and the bytes moved.
        """
        hole = self._free.find(size)
        if hole is not None or size > self.free_bytes:
            return hole
        # Cheap first: move less than ``size`` bytes into holes elsewhere.
        self._evacuate(size)
        hole = self._free.find(size)
        if hole is not None:
            return hole
        # Then gather enough free bytes within one run: with nothing held there is one.
        run = self._cheapest(size, _free_size)
        if run is not None:
            self._slide(run)
            return self._free.find(size)
        # Held spans part the free bytes: larger holes may take what is in the way.
        self.compact()
        self._evacuate(size)
        return self._free.find(size)

    def compact(self) -> None:
        """Slide all spans nobody holds down: one free span below each held one."""
        for run in list(self._runs()):
            self._slide(run)

    def check(self) -> list[Taken]:
        """Count everything anew; O(spans).

        Returns:
            All taken spans in address order.

        Raises:
            InvariantError: There is a gap or an overlap, free neighbours are not
                merged, or a count or a list is off.
        """
        spans = list(self._walk())
        free = {span for span in spans if not isinstance(span, Taken)}
        neighbours = pairwise(spans)
        if any(first in free and second in free for first, second in neighbours):
            raise InvariantError("host arena: free neighbours are not merged")
        if free != self._free.listed():
            raise InvariantError("host arena: free spans are not listed as they are")
        counted = (len(spans), len(spans), sum(span.size for span in free))
        booked = (len(self._starts), len(self._ends), self.free_bytes)
        if counted != booked:
            raise InvariantError(
                f"host arena: counted spans by start, by end and free bytes {counted}, "
                f"booked {booked}"
            )
        return [span for span in spans if isinstance(span, Taken)]

    def _walk(self) -> Iterator[Span]:
        """Yield all spans in address order.

        Raises:
            InvariantError: One does not begin where the last one ended.
        """
        at = 0
        while at < self.size:
            span = self._starts.get(at)
            if span is None or self._ends.get(span.end) is not span or span.size <= 0:
                raise InvariantError(f"host arena: no span begins at byte {at}")
            yield span
            at = span.end

    def _runs(self) -> Iterator[list[Span]]:
        """Yield the spans between held ones, in address order."""
        run: list[Span] = []
        for span in self._walk():
            if not isinstance(span, Taken) or not span.holds:
                run.append(span)
            elif run:
                yield run
                run = []
        if run:
            yield run

    def _cheapest(self, size: int, weight: Callable[[Span], int]) -> list[Span] | None:
        """Return neighbours that weigh ``size`` and have the fewest bytes to move."""
        best: list[Span] | None = None
        best_cost = self.size
        for run in self._runs():
            first = total = cost = 0
            for last, span in enumerate(run):
                total += weight(span)
                cost += span.size - _free_size(span)
                while total - weight(run[first]) >= size:
                    total -= weight(run[first])
                    cost -= run[first].size - _free_size(run[first])
                    first += 1
                if total >= size and cost < best_cost:
                    best, best_cost = run[first : last + 1], cost
        return best

    def _evacuate(self, size: int) -> None:
        """Empty the neighbours that span ``size`` bytes most cheaply, where that goes.

        What finds no place elsewhere stays, and what was moved stays moved.
        """
        window = self._cheapest(size, lambda span: span.size) or []
        for span in window:
            self._free.discard(span)  # nothing moves from the window into itself
        taken = [span for span in window if isinstance(span, Taken)]
        emptied = [span for span in window if not isinstance(span, Taken)]
        for span in sorted(taken, key=lambda span: -span.size):
            hole = self._free.find(span.size)
            if hole is None:
                break
            left = Span(span.start, span.size)
            self._move(span, hole)
            self._enter(left)
            self.free_bytes += left.size
            emptied.append(left)
        for gap in emptied:
            if self._starts.get(gap.start) is gap:  # it was not merged meanwhile
                self._forget(gap)
                self._enter_free(gap.start, gap.end)

    def _move(self, span: Taken, hole: Span) -> None:
        """Move a span to the start of a hole; its old bytes are nobody's then."""
        self._forget(span)
        self._relocate(span, hole.start)
        self.fill(hole, span)

    def _slide(self, run: list[Span]) -> None:
        """Move the taken spans of a run down, its free bytes behind them."""
        at, end = run[0].start, run[-1].end
        for span in run:
            self._forget(span)
        for span in run:
            if isinstance(span, Taken):
                if span.start != at:
                    self._relocate(span, at)
                self._enter(span)
                at = span.end
        if at < end:
            self._enter_free(at, end)

    def _relocate(self, span: Taken, start: int) -> None:
        self._copy(span, start)
        self.moved_bytes += span.size
        span.start = start

    def _enter_free(self, start: int, end: int) -> None:
        """Enter free bytes, merged with all that is free beside them.

        Where a window is being emptied, several free spans may lie side by side.
        """
        while (span := self._ends.get(start)) and not isinstance(span, Taken):
            self._forget(span)
            start = span.start
        while (span := self._starts.get(end)) and not isinstance(span, Taken):
            self._forget(span)
            end = span.end
        whole = Span(start, end - start)
        self._enter(whole)
        self._free.add(whole)
        self.free_bytes += whole.size

    def _enter(self, span: Span) -> None:
        self._starts[span.start] = self._ends[span.end] = span

    def _forget(self, span: Span) -> None:
        del self._starts[span.start], self._ends[span.end]
        if not isinstance(span, Taken):
            self._free.discard(span)
            self.free_bytes -= span.size


def _free_size(span: Span) -> int:
    return 0 if isinstance(span, Taken) else span.size
