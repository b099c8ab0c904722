"""Free spans of an arena, found by size in constant time."""

from __future__ import annotations

from dataclasses import dataclass

GRAIN = 64
"""Bytes every span is a multiple of: a cache line, and what DMA and SIMD want."""

CLASSES_LOG2 = 3
"""Size classes to every doubling, as a power of two."""


def rounded(nbytes: int) -> int:
    """Round ``nbytes`` up to whole grains, at least one."""
    return max(1, -(-nbytes // GRAIN)) * GRAIN


@dataclass(slots=True, eq=False)
class Span:
    """Consecutive bytes of an arena.

    Attributes:
        start: First byte, a multiple of ``GRAIN``.
        size: Length in bytes, a multiple of ``GRAIN``.
    """

    start: int
    size: int

    @property
    def end(self) -> int:
        """The byte behind the last one."""
        return self.start + self.size


class FreeSpans:
    """Free spans in lists by size, and a bitmap of the lists that hold any.

    Eight classes to a doubling, as in TLSF (Masmano et al. 2004, doi
    10.1109/EMRTS.2004.1311009); a Python integer is the bitmap. Deterministic: the
    oldest span of a class is found first.
    """

    def __init__(self) -> None:
        self._lists: dict[int, dict[Span, None]] = {}
        self._filled = 0

    def add(self, span: Span) -> None:
        """List a span; its size does not change while it is listed."""
        index = size_class(span.size)
        self._lists.setdefault(index, {})[span] = None
        self._filled |= 1 << index

    def discard(self, span: Span) -> None:
        """Take a span off its list; nothing happens when it is not listed."""
        index = size_class(span.size)
        listed = self._lists.get(index, {})
        listed.pop(span, None)
        if not listed:
            self._filled &= ~(1 << index)

    def find(self, size: int) -> Span | None:
        """Return a listed span of at least ``size`` bytes, of the smallest class.

        Args:
            size: A multiple of ``GRAIN``, >= ``GRAIN``.

        Returns:
            None only where no span is large enough. O(1), and linear in the spans of
            one class where only spans of the size's own class may do.
        """
        own = size_class(size)
        roomy = own if size == class_floor(own) else own + 1
        above = self._filled >> roomy << roomy
        if above:
            lowest = (above & -above).bit_length() - 1
            return next(iter(self._lists[lowest]))
        fitting = (span for span in self._lists.get(own, ()) if span.size >= size)
        return next(fitting, None)

    def listed(self) -> set[Span]:
        """Return all spans, collected anew."""
        return {span for spans in self._lists.values() for span in spans}


def size_class(size: int) -> int:
    """Return the class of a size in bytes; larger sizes have no smaller class."""
    grains = size // GRAIN
    shift = max(0, grains.bit_length() - CLASSES_LOG2 - 1)
    return (shift << CLASSES_LOG2) + (grains >> shift)


def class_floor(index: int) -> int:
    """Return the smallest size of a class, in bytes."""
    shift = max(0, (index >> CLASSES_LOG2) - 1)
    return ((index - (shift << CLASSES_LOG2)) << shift) * GRAIN
