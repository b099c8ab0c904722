"""Cuts a copy into pieces: wherever what is copied, or where it goes, ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vericache_sglang.kv.staging import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Piece(NamedTuple):
    """Entries in one piece on both sides: one copy of keys and one of values.

    Attributes:
        block: Which of the blocks they are of.
        first: The first of them in it.
        span: Where they go, as many slots.
    """

    block: int
    first: int
    span: Span

    @property
    def rows(self) -> slice:
        """The entries in their block."""
        return slice(self.first, self.first + self.span.slots)

    @property
    def slots(self) -> slice:
        """The slots in their buffer."""
        return slice(self.span.start, self.span.end)


def deal(counts: Sequence[int], spans: Sequence[Span]) -> Iterator[Piece]:
    """Deal blocks of entries out to spans of slots, both in order.

    At most ``len(counts) + len(spans) - 1`` pieces; none is empty.

    Args:
        counts: Entries of each block, >= 0.
        spans: Together at least as many slots; what is left over stays as it is.
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
