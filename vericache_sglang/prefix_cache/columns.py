"""Segments of an index as NumPy arrays, so that scans of them are vectorised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vericache_sglang.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vericache_sglang.prefix_cache.segment import Segment

ROOT = -1
"""Parent row of a root segment."""

ABSENT = -2
"""Parent row of a segment whose parent is not in the index."""

NOWHERE = 4
"""Tier of a part that does not exist; one more than those of ``Tier``."""

_LATEST, _MOST_BITS = (1 << 27) - 1, 36
"""Largest start of a segment, in tokens; bits of the insertion counter in ``rank``."""

_FEWEST = 64
"""Initial number of rows."""


class Columns:
    """One row per segment, unordered; rows of removed segments are reused.

    Attributes:
        rank: [R] int64, sort key: children first, then in order of insertion. 0 in a
            free row.
        start: [R] int64, tokens before the segment.
        parent: [R] int64, row of the parent, ROOT or ABSENT.
        tokens: [R] int64, tokens of the segment.
        nbytes: [2, R] float64, bytes of residual KV and draft KV; 0: no such part.
        tier: [2, R] int64, tiers of the two parts; NOWHERE for a missing part.
        uses: [R] float64, decayed count of uses as of ``last_use``.
        last_use: [R] float64, time in seconds.
        pinned: [R] bool, whether the segment has a user.
        stored: [R] bool, whether the store has all of the segment.
        names: [R] names; "" in a free row.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._row_of: dict[str, int] = {}
        self._free: list[int] = []
        self._entered = 0
        self._rows(0)

    def __len__(self) -> int:
        """Rows, free ones included."""
        return len(self.names)

    def _rows(self, kept: int) -> None:
        """Double the number of rows, preserving the first ``kept``."""
        rows = max(_FEWEST, 2 * kept)
        old = None if not kept else self._arrays()
        self.rank = np.zeros(rows, np.int64)
        self.start = np.zeros(rows, np.int64)
        self.parent = np.full(rows, ROOT, np.int64)
        self.tokens = np.zeros(rows, np.int64)
        self.nbytes = np.zeros((2, rows))
        self.tier = np.full((2, rows), NOWHERE, np.int64)
        self.uses = np.zeros(rows)
        self.last_use = np.zeros(rows)
        self.pinned = np.zeros(rows, np.bool_)
        self.stored = np.zeros(rows, np.bool_)
        if old is not None:
            for new, was in zip(self._arrays(), old, strict=True):
                new[..., :kept] = was
        self.names += [""] * (rows - kept)
        self._free += range(rows - 1, kept - 1, -1)

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return (
            *(self.rank, self.start, self.parent, self.tokens, self.nbytes),
            *(self.tier, self.uses, self.last_use, self.pinned, self.stored),
        )

    def enter(self, segment: Segment, children: Iterable[str]) -> None:
        """Add a segment.

        Args:
            segment: The segment; its parent may be absent.
            children: Its children in the index.

        Raises:
            InvariantError: The segment starts beyond ``_LATEST`` tokens.
        """
        if segment.start > _LATEST:
            raise InvariantError(f"segment {segment.name} starts at {segment.start}")
        if not self._free:
            self._rows(len(self))
        row = self._free.pop()
        self.names[row], self._row_of[segment.name] = segment.name, row
        self._entered += 1
        self.rank[row] = (_LATEST - segment.start) << _MOST_BITS | self._entered
        self.start[row] = segment.start
        parent = segment.parent
        self.parent[row] = ROOT if parent is None else self._row_of.get(parent, ABSENT)
        for child in children:
            self.parent[self._row_of[child]] = row
        self.use(segment)
        self.put(segment)

    def use(self, segment: Segment) -> None:
        """Update the uses and the last use of a segment."""
        row = self._row_of[segment.name]
        self.uses[row], self.last_use[row] = segment.uses, segment.last_use

    def put(self, segment: Segment) -> None:
        """Update the sizes, tiers and flags of a segment."""
        row, content = self._row_of[segment.name], segment.content
        rest, draft = content.residual, content.draft
        self.tokens[row] = content.tokens
        self.nbytes[0, row], self.tier[0, row] = rest.nbytes, rest.tier
        if draft is None:
            self.nbytes[1, row], self.tier[1, row] = 0, NOWHERE
        else:
            self.nbytes[1, row], self.tier[1, row] = draft.nbytes, draft.tier
        self.pinned[row], self.stored[row] = bool(segment.users), segment.stored

    def leave(self, name: str, children: Iterable[str]) -> None:
        """Free a segment's row.

        Args:
            children: Its children in the index.
        """
        row = self._row_of.pop(name)
        for child in children:
            self.parent[self._row_of[child]] = ABSENT
        self.names[row], self.rank[row] = "", 0
        self._free.append(row)

    def check(self, segments: Mapping[str, Segment]) -> None:
        """Compare every row with its segment.

        Raises:
            InvariantError: A row differs.
        """
        if self._row_of.keys() != segments.keys():
            raise InvariantError("the rows are of other segments")
        for name, row in self._row_of.items():
            segment = segments[name]
            above = segment.parent
            parent = ROOT if above is None else self._row_of.get(above, ABSENT)
            draft = segment.content.draft
            wanted = (
                *(name, segment.start, parent, segment.content.tokens),
                *(segment.content.residual.nbytes, draft.nbytes if draft else 0),
                *(segment.content.residual.tier, draft.tier if draft else NOWHERE),
                *(segment.uses, segment.last_use, bool(segment.users), segment.stored),
            )
            found = (
                *(self.names[row], self.start[row], self.parent[row], self.tokens[row]),
                *(*self.nbytes[:, row], *self.tier[:, row]),
                *(self.uses[row], self.last_use[row]),
                *(self.pinned[row], self.stored[row]),
            )
            if found != wanted or not self.rank[row]:
                raise InvariantError(f"segment {name} is {wanted}, not {found}")
