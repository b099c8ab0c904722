"""The staging buffer: slots that residual KV occupies during verification."""

from __future__ import annotations

from dataclasses import dataclass

from vericache_sglang.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive slots.

    Attributes:
        start: First slot, an index into the KV pool.
        slots: Length, in slots.
    """

    start: int
    slots: int

    @property
    def end(self) -> int:
        """The slot after the last one."""
        return self.start + self.slots


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """Slots of one ``take``. Compared by identity, because slots are reused.

    Attributes:
        pieces: Disjoint spans in address order, each of whole pages.
    """

    pieces: tuple[Span, ...]

    @property
    def slots(self) -> int:
        """Slots taken: the requested number, rounded up to whole pages."""
        return sum(piece.slots for piece in self.pieces)

    def first(self, slots: int) -> tuple[Span, ...]:
        """Return the spans of the first ``slots`` slots, in the order they are filled.

        Raises:
            InvariantError: The lease is smaller.
        """
        if slots > self.slots:
            raise InvariantError(f"{slots} slots in a lease of {self.slots}")
        spans = []
        for piece in self.pieces:
            if slots <= 0:
                break
            spans.append(Span(piece.start, min(piece.slots, slots)))
            slots -= piece.slots
        return tuple(spans)


class StagingBuffer:
    """Leases slots outside SGLang's allocator, in as few pieces as possible.

    The order of slots inside a row is arbitrary, so a lease may consist of pieces and
    no room is lost to fragmentation. Deterministic: the same calls in the same order
    give the same leases on every rank.

    Args:
        start: First slot of the staging buffer in the KV pool, at a page boundary.
        slots: Size, in slots; a partial page at the end stays unused, 0: no staging.
        page: Page size, in slots; >= 1.

    Raises:
        InvariantError: ``start`` is inside a page.
    """

    def __init__(self, start: int, slots: int, page: int = 1) -> None:
        if start % page:
            raise InvariantError(f"staging starts at slot {start}, pages are {page}")
        self.start = start
        self.page = page
        self.slots = slots // page * page
        self._spans: list[Span] = [Span(start, self.slots)] if self.slots else []
        self._free = self.slots
        self._leases: set[Lease] = set()

    @property
    def free(self) -> int:
        """Free slots, a multiple of the page size."""
        return self._free

    @property
    def used(self) -> int:
        """Slots taken now."""
        return self.slots - self._free

    def take(self, slots: int) -> Lease | None:
        """Lease slots; O(n log n) in the free spans.

        Args:
            slots: Slots wanted, >= 1; rounded up to whole pages.

        Returns:
            The smallest single span that is large enough, else the largest spans and
            the smallest one that holds the rest; the lower address where two are
            equal. None only where fewer slots are free.

        Raises:
            InvariantError: ``slots`` is below 1.
        """
        if slots < 1:
            raise InvariantError(f"a lease of {slots} slots")
        rest = -(-slots // self.page) * self.page
        if rest > self._free:
            return None
        lease = Lease(self._cut(rest))
        self._free -= lease.slots
        self._leases.add(lease)
        return lease

    def give(self, lease: Lease) -> None:
        """Free a lease of ``take``; merges it with adjacent free spans.

        Raises:
            InvariantError: It was freed before, or is not of this buffer; nothing
                changed.
        """
        if lease not in self._leases:
            raise InvariantError(f"staging slots {lease} were freed twice")
        self._leases.remove(lease)
        merged: list[Span] = []
        for span in sorted([*self._spans, *lease.pieces], key=lambda span: span.start):
            if merged and merged[-1].end == span.start:
                last = merged.pop()
                span = Span(last.start, last.slots + span.slots)
            merged.append(span)
        self._spans = merged
        self._free += lease.slots

    def _cut(self, slots: int) -> tuple[Span, ...]:
        """Take ``slots`` free slots out of the free spans."""
        largest = sorted(self._spans, key=lambda span: (-span.slots, span.start))
        taken: list[Span] = []
        while largest[len(taken)].slots < slots:
            taken.append(largest[len(taken)])
            slots -= taken[-1].slots
        fitting = [span for span in largest[len(taken) :] if span.slots >= slots]
        last = min(fitting, key=lambda span: (span.slots, span.start))
        left = Span(last.start + slots, last.slots - slots)
        gone = {*taken, last}
        spans = [left if span is last else span for span in self._spans]
        self._spans = [span for span in spans if span.slots and span not in gone]
        pieces = [*taken, Span(last.start, slots)]
        return tuple(sorted(pieces, key=lambda piece: piece.start))
