"""The staging region: contiguous slots a complement occupies while it is verified."""

from __future__ import annotations

from dataclasses import dataclass

from vericache_sglang.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Span:
    """A taken piece of the region.

    Attributes:
        start: First slot, an index into the KV pool.
        slots: Length, in slots.
    """

    start: int
    slots: int


class StagingRegion:
    """First-fit spans over slots that SGLang's allocator never sees.

    Deterministic: the same calls in the same order give the same spans on every rank.

    Args:
        start: First slot of the region in the KV pool.
        slots: Size, in slots; 0 means nothing can be staged.
    """

    def __init__(self, start: int, slots: int) -> None:
        self.start = start
        self.slots = slots
        self._free: list[Span] = [Span(start, slots)] if slots else []

    @property
    def used(self) -> int:
        """Slots taken now."""
        return self.slots - sum(span.slots for span in self._free)

    def free_spans(self) -> tuple[int, ...]:
        """Return the sizes of the free spans in address order, in slots."""
        return tuple(span.slots for span in self._free)

    def take(self, slots: int) -> Span | None:
        """Take the first free piece of ``slots`` >= 1 slots; None when none is left."""
        for i, span in enumerate(self._free):
            if span.slots < slots:
                continue
            rest = Span(span.start + slots, span.slots - slots)
            self._free[i : i + 1] = [rest] if rest.slots else []
            return Span(span.start, slots)
        return None

    def give(self, span: Span) -> None:
        """Return a span that ``take`` handed out; merges it with free neighbours.

        Raises:
            InvariantError: The span overlaps a free one: it was given back twice.
        """
        spans = sorted([*self._free, span], key=lambda piece: piece.start)
        merged: list[Span] = []
        for piece in spans:
            if merged and merged[-1].start + merged[-1].slots > piece.start:
                raise InvariantError(f"staging slots {span} were given back twice")
            if merged and merged[-1].start + merged[-1].slots == piece.start:
                last = merged.pop()
                piece = Span(last.start, last.slots + piece.slots)
            merged.append(piece)
        self._free = merged
