"""Cuts a copy into pieces that are contiguous in source and target."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vericache_sglang.kv.staging import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Piece(NamedTuple):
    """Entries contiguous on both sides: one copy of keys and one of values.

    Attributes:
        block: Index of their block.
        first: Index of the first entry in the block.
        span: Target slots, one per entry.
    """

    block: int
    first: int
    span: Span

    @property
    def rows(self) -> slice:
        """Range of the entries in their block."""
        return slice(self.first, self.first + self.span.slots)

    @property
    def slots(self) -> slice:
        """Range of the slots in their buffer."""
        return slice(self.span.start, self.span.end)


def assign_spans(counts: Sequence[int], spans: Sequence[Span]) -> Iterator[Piece]:
    """Assign blocks of entries to spans of slots, both in order.

    At most ``len(counts) + len(spans) - 1`` pieces; none is empty.

    Args:
        counts: Entries of each block, >= 0.
        spans: Together at least as many slots; excess slots stay unused.
    """
    left = iter(spans)
    span = Span(0, 0)
    for block, count in enumerate(counts):
        first = 0
        while first < count:
            if not span.slots:
                span = next(left)
            slots = min(count - first, span.slots)
            if slots:
                yield Piece(block, first, Span(span.start, slots))
            first += slots
            span = Span(span.start + slots, span.slots - slots)
