"""The index of cached segments: tiers of their parts, uses, pins and totals.

It only keeps records; callers move the bytes and decide. Several ranks must make the
same calls with the same times, so that all ranks choose the same victims.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError, InvariantError
from vericache_sglang.prefix_cache.columns import Columns
from vericache_sglang.prefix_cache.segment import Content, Held, Part, Segment, Tier

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

HALF_LIFE_S = 600.0
"""Default half-life of a use, in seconds."""


@dataclass(frozen=True, slots=True)
class Total:
    """Totals of one tier.

    Attributes:
        tokens: Tokens, each counted once over all tiers (``Content.tokens_of``).
        nbytes: Bytes; in GONE those of lost parts of segments with a remaining part.
    """

    tokens: int
    nbytes: int


class SegmentIndex:
    """Segments by name, each linked to its parent, the segment before it.

    A method that raises has changed nothing.

    Args:
        half_life_s: Half-life of a use, in seconds, > 0.

    Attributes:
        half_life_s: The same.
        columns: All segments as arrays, for scans.
        changes: Counts changes of the index other than uses.

    Raises:
        ConfigError: ``half_life_s`` is not above 0 and finite.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        if not (half_life_s > 0 and isfinite(half_life_s)):
            raise ConfigError(f"half_life_s must be > 0 and finite, got {half_life_s}")
        self.half_life_s = half_life_s
        self.columns = Columns()
        self.changes = 0
        self._segments: dict[str, Segment] = {}
        self._pinned: dict[str, None] = {}
        # Kept for dropped parents too, as they may be added again. The inner dict is a
        # set in order of insertion, the same on every rank.
        self._children: dict[str, dict[str, None]] = {}
        self._totals = {tier: [0, 0] for tier in Tier}

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, name: str) -> bool:
        return name in self._segments

    def get(self, name: str) -> Segment | None:
        """Return the present record of a segment, or None."""
        return self._segments.get(name)

    def segments(self) -> Collection[Segment]:
        """Return a view of all segments, in a deterministic order."""
        return self._segments.values()

    def pinned(self) -> Collection[str]:
        """Return a view of the names of all pinned segments."""
        return self._pinned.keys()

    def children(self, name: str) -> tuple[str, ...]:
        """Return the children of ``name``, which may itself be absent."""
        return tuple(self._children.get(name, ()))

    def total(self, tier: Tier) -> Total:
        """Return the totals of a tier; O(1)."""
        tokens, nbytes = self._totals[tier]
        return Total(tokens, nbytes)

    def add(self, name: str, parent: str | None, content: Content, now: float) -> bool:
        """Record a segment, or a use of a known segment.

        The content of a known, unpinned segment is replaced if another compressor made
        it, a part of it is gone, or all of it is in the store only. Otherwise it is
        kept: parts of two compressions are never mixed.

        Args:
            name: Chained hash of the prefix up to the segment's end.
            parent: Name of the segment before it, which must be known; None for a root
                segment.
            content: Its parts; none may be GONE.
            now: Time of the use, in seconds.

        Returns:
            True if ``content`` was recorded; False if the known content was kept, so
            that the caller's parts are not needed.

        Raises:
            InvariantError: The parent is not known; the name is known with another
                parent or length; its children start elsewhere than its end; a part is
                GONE; the segment starts at 2^27 tokens or later.
        """
        if not content.restorable:
            raise InvariantError(f"segment {name} comes with a part GONE: {content}")
        old = self._segments.get(name)
        if old is None:
            self._enter(name, parent, content, now)
            return True
        if old.parent != parent or old.content.tokens != content.tokens:
            raise InvariantError(
                f"segment {name} follows {old.parent} with {old.content.tokens} tokens "
                f"here; it came as following {parent} with {content.tokens}"
            )
        same = old.content.compressor == content.compressor
        here = old.content.restorable and not old.content.away
        stays = old.pins > 0 or (same and here)
        self._put(self._used(old, now), old.content if stays else content)
        return not stays

    def match(self, names: Sequence[str], start: int = 0) -> int:
        """Count the consecutive restorable segments from ``names[start]`` on."""
        count = 0
        for index in range(start, len(names)):
            segment = self._segments.get(names[index])
            if segment is None or not segment.content.restorable:
                break
            count += 1
        return count

    def touch(self, names: Sequence[str], now: float) -> None:
        """Count one use of each segment at ``now``, in seconds.

        Raises:
            InvariantError: A segment is not known.
        """
        for segment in [self._known(name) for name in names]:
            used = self._used(segment, now)
            self._segments[used.name] = used
            self.columns.use(used)

    def note_stored(self, name: str, stored: bool) -> None:
        """Record whether the store has all of a segment.

        Raises:
            InvariantError: The segment is not known.
        """
        segment = self._known(name)
        if segment.stored is not stored:
            self._put(replace(segment, stored=stored), segment.content)

    def pin(self, names: Sequence[str]) -> None:
        """Pin segments, once per occurrence: their parts must stay in their tiers.

        Raises:
            InvariantError: A segment is not known.
        """
        self._hold(names, 1)

    def unpin(self, names: Sequence[str]) -> None:
        """Undo a ``pin`` of the same names.

        Raises:
            InvariantError: A segment is not known or not pinned that often.
        """
        self._hold(names, -1)

    def place(self, name: str, part: Part, tier: Tier) -> None:
        """Record that a part has moved to ``tier``.

        A segment whose last part becomes GONE is removed, even if it has children.

        Raises:
            InvariantError: The segment is not known or has no such part; it is pinned
                while the part moves; or the part was GONE: only ``add`` restores it.
        """
        segment = self._known(name)
        content = segment.content
        held = content.held(part)
        if held is None:
            raise InvariantError(f"segment {name} is whole: it has no draft part")
        if held.tier is tier:
            return
        if segment.pins:
            raise InvariantError(
                f"{part.value} of segment {name} moves from {held.tier.name} to "
                f"{tier.name}, but is pinned {segment.pins} times"
            )
        if held.tier is Tier.GONE:
            raise InvariantError(f"{part.value} of segment {name} is gone for good")
        moved = Held(held.nbytes, tier)
        if part is Part.DRAFT:
            content = replace(content, draft=moved)
        else:
            content = replace(content, residual=moved)
        if all(each.tier is Tier.GONE for _, each in content.parts):
            self._forget(segment)
        else:
            self._put(segment, content)

    def drop(self, name: str, *, strand: bool = False) -> None:
        """Remove a segment.

        Args:
            name: Its name.
            strand: Allow this although it has children, which cannot be matched until
                it is added again.

        Raises:
            InvariantError: It is not known or is pinned, or it has children and
                ``strand`` is False.
        """
        segment = self._known(name)
        if segment.pins:
            raise InvariantError(f"segment {name} is pinned {segment.pins} times")
        if name in self._children and not strand:
            raise InvariantError(
                f"segment {name} is followed by {self.children(name)}; dropping it "
                "strands them"
            )
        self._forget(segment)

    def check(self) -> None:
        """Recount everything; for tests and idle times, O(segments).

        Raises:
            InvariantError: A total, a link or a record is inconsistent.
        """
        totals = {tier: [0, 0] for tier in Tier}
        children: dict[str, set[str]] = {}
        for segment in self._segments.values():
            for part, held in segment.content.parts:
                totals[held.tier][0] += segment.content.tokens_of(part)
                totals[held.tier][1] += held.nbytes
            if segment.parent is not None:
                children.setdefault(segment.parent, set()).add(segment.name)
            self._check(segment)
        if totals != self._totals:
            raise InvariantError(f"totals are {totals}, not {self._totals}")
        if children != {name: set(each) for name, each in self._children.items()}:
            raise InvariantError("the links to following segments are not as recorded")
        if {s.name for s in self._segments.values() if s.pins} != set(self._pinned):
            raise InvariantError(f"pinned are not {list(self._pinned)}")
        self.columns.check(self._segments)

    def _check(self, segment: Segment) -> None:
        parent = None if segment.parent is None else self.get(segment.parent)
        before = parent.end if parent else segment.start
        if segment.start != (0 if segment.parent is None else before):
            raise InvariantError(f"segment {segment.name} starts at {segment.start}")
        places = {held.tier for _, held in segment.content.parts}
        if segment.pins < 0 or segment.uses < 1 or places == {Tier.GONE}:
            raise InvariantError(f"segment {segment.name} cannot be: {segment}")

    def _enter(
        self, name: str, parent: str | None, content: Content, now: float
    ) -> None:
        start = 0 if parent is None else self._known(parent).end
        for child in self._children.get(name, ()):
            # Cannot happen as names are chained hashes; also excludes cycles.
            if self._segments[child].start != start + content.tokens:
                raise InvariantError(
                    f"segment {name} ends at {start + content.tokens}, {child} that "
                    f"follows it starts at {self._segments[child].start}"
                )
        segment = Segment(
            name=name, parent=parent, start=start, content=content, last_use=now
        )
        self.columns.enter(segment, self._children.get(name, ()))
        self._segments[name] = segment
        if parent is not None:
            self._children.setdefault(parent, {})[name] = None
        self._count(content, 1)

    def _known(self, name: str) -> Segment:
        segment = self._segments.get(name)
        if segment is None:
            raise InvariantError(f"segment {name} is not in the index")
        return segment

    def _used(self, segment: Segment, now: float) -> Segment:
        uses = 1.0 + segment.uses_at(now, self.half_life_s)
        return replace(segment, uses=uses, last_use=max(now, segment.last_use))

    def _hold(self, names: Sequence[str], by: int) -> None:
        changed = []
        for name, count in Counter(names).items():
            segment = self._known(name)
            pins = segment.pins + by * count
            if pins < 0:
                raise InvariantError(
                    f"segment {name} is pinned {segment.pins} times, unpinned {count}"
                )
            changed.append(replace(segment, pins=pins))
        self.changes += 1
        for segment in changed:
            self._segments[segment.name] = segment
            self.columns.put(segment)
            if segment.pins:
                self._pinned[segment.name] = None
            else:
                self._pinned.pop(segment.name, None)

    def _put(self, segment: Segment, content: Content) -> None:
        """Replace the record of a known segment, and update the totals."""
        self._count(segment.content, -1)
        self._count(content, 1)
        segment = replace(segment, content=content)
        self._segments[segment.name] = segment
        self.columns.use(segment)
        self.columns.put(segment)

    def _forget(self, segment: Segment) -> None:
        del self._segments[segment.name]
        self.columns.leave(segment.name, self._children.get(segment.name, ()))
        self._count(segment.content, -1)
        if segment.parent is not None:
            siblings = self._children[segment.parent]
            del siblings[segment.name]
            if not siblings:
                del self._children[segment.parent]

    def _count(self, content: Content, by: int) -> None:
        self.changes += 1
        for part, held in content.parts:
            total = self._totals[held.tier]
            total[0] += by * content.tokens_of(part)
            total[1] += by * held.nbytes
