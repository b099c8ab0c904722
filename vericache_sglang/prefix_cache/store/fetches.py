"""Reads of a request's stored segments that are under way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vericache_sglang.prefix_cache.store.found import Found, StoreFetch


@dataclass(slots=True)
class Fetch:
    """A fetch from the store for a waiting request.

    Attributes:
        names: Segments still to fetch.
        parent: Name of the segment before them; None at the start of the prompt.
        start: Position of the first requested token.
        deadline: End of the wait, in ``time.monotonic`` seconds.
        reading: The read of the first of ``names``; None when the fetch has ended.
        tokens: Tokens copied to the host tier so far.
        agreed: What all ranks have read of ``reading``, see ``Read``; None: they
            have not agreed.
        drafts: Draft KV alone is read, for ``start_early``.
    """

    names: Sequence[str]
    parent: str | None
    start: int
    deadline: float
    reading: StoreFetch | None
    tokens: int = 0
    agreed: Read | None = None
    drafts: bool = False


@dataclass(slots=True)
class Rest:
    """The residual KV of the segments of a request that drafts already.

    Attributes:
        names: The segments.
        reading: Its read.
        nbytes: Bytes of all of it.
        wait_s: Most seconds without a further segment; then it counts as lost.
        taken: Leading segments returned by ``arrived``.
        deadline: End of that wait, in ``time.monotonic`` seconds.
    """

    names: Sequence[str]
    reading: StoreFetch
    nbytes: int
    wait_s: float
    taken: int = 0
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.wait_s

    def arrived(self) -> Iterator[tuple[str, Found]]:
        """Yield the segments that have arrived since the last call."""
        found = self.reading.found
        if self.taken < len(found):
            self.deadline = time.monotonic() + self.wait_s
        while self.taken < len(found):
            at, self.taken = self.taken, self.taken + 1
            each, found[at] = found[at], replace(found[at], parts={})
            yield self.names[at], each

    @property
    def complete(self) -> bool:
        """Whether all of it was returned by ``arrived``."""
        return self.taken == len(self.names)

    @property
    def lost(self) -> bool:
        """Whether some of it will not arrive."""
        reading = self.reading
        short = reading.done and len(reading.found) < len(self.names)
        return short or (not self.complete and time.monotonic() > self.deadline)


class Read(NamedTuple):
    """What has been read of the segments of a fetch.

    Attributes:
        segments: Leading segments; -1 while more may arrive before the deadline.
        usable: Bit i: segment i is usable in two parts, see ``usable``.
        whole: Bit i: segment i is stored as full KV.
        scored: Bit i: segment i has the scores of its tokens.
    """

    segments: int
    usable: int = 0
    whole: int = 0
    scored: int = 0
