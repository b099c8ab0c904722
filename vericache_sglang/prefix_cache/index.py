"""All records of cached segments: tiers of their parts, KV held, users and totals.

Callers move KV and decide. Several ranks must make the same calls with the same times,
so that all ranks choose the same victims.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError, InvariantError
from vericache_sglang.prefix_cache.columns import Columns
from vericache_sglang.prefix_cache.segment import (
    UNKNOWN,
    Content,
    Form,
    Part,
    PlacedPart,
    Segment,
    Tier,
    Use,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

    from vericache_sglang.kv.host_image import HostImage
    from vericache_sglang.prefix_cache.segment_images import SegmentDraft

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

    A segment is in the index if a match can reach it. Others have a record too while
    they hold KV that the index does not list or lists in another form.

    A method that raises has changed nothing.

    Args:
        half_life_s: Half-life of a use, in seconds, > 0.

    Attributes:
        half_life_s: The same.
        columns: All segments in the index as arrays, for scans.
        host_bytes: Bytes of the host pages of all segments.
        residual_bytes: The part of them that is residual KV.
        used_slots: Slots of draft KV that requests use.
        idle_slots: Slots of draft KV that no request uses, which can be evicted.

    Raises:
        ConfigError: ``half_life_s`` is not above 0 and finite.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        if not (half_life_s > 0 and isfinite(half_life_s)):
            raise ConfigError(f"half_life_s must be > 0 and finite, got {half_life_s}")
        self.half_life_s = half_life_s
        self._reset()

    def _reset(self) -> None:
        self.columns = Columns()
        self._segments: dict[str, Segment] = {}
        self._unlinked: dict[str, Segment] = {}
        self._names_of: dict[Hashable, dict[str, None]] = {}
        # With draft KV on the device, in order of use.
        self._drafts: dict[str, None] = {}
        # Kept for dropped parents too, as they may be added again. The inner dict is a
        # set in order of insertion, the same on every rank.
        self._children: dict[str, dict[str, None]] = {}
        self._totals = {tier: [0, 0] for tier in Tier}
        self.host_bytes = self.residual_bytes = self._used_bytes = 0
        self.used_slots = self.idle_slots = 0

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, name: str) -> bool:
        return name in self._segments

    def get(self, name: str) -> Segment | None:
        """Return a segment in the index, or None."""
        return self._segments.get(name)

    def find(self, name: str) -> Segment:
        """Return the record of a segment, in the index or not; empty if unknown."""
        found = self._segments.get(name) or self._unlinked.get(name)
        return found or Segment(name=name)

    def segments(self) -> Collection[Segment]:
        """Return a view of all segments in the index, in a deterministic order."""
        return self._segments.values()

    def children(self, name: str) -> tuple[str, ...]:
        """Return the children of ``name``, which may itself be absent."""
        return tuple(self._children.get(name, ()))

    def total(self, tier: Tier) -> Total:
        """Return the totals of a tier; O(1)."""
        tokens, nbytes = self._totals[tier]
        return Total(tokens, nbytes)

    def add(self, name: str, parent: str | None, content: Content, now: float) -> bool:
        """Record a segment, or a use of a known segment.

        The content of a known segment that is not in use is replaced if another
        compressor made it, a part of it is gone, or all of it is in the store only.
        Otherwise it is kept: parts of two compressions are never mixed.

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
        self._note_use(old, now)
        if old.in_use or (same and here):
            return False
        self.update(name, content)
        return True

    def touch(self, names: Sequence[str], now: float) -> None:
        """Count one use of each segment at ``now``, in seconds.

        Raises:
            InvariantError: A segment is not known.
        """
        for segment in [self._known(name) for name in names]:
            self._note_use(segment, now)

    def note_stored(self, name: str, stored: bool) -> None:
        """Record whether the store has all of a segment.

        Raises:
            InvariantError: The segment is not known.
        """
        segment = self._known(name)
        segment.stored = stored
        self.columns.put(segment)

    def place(self, name: str, part: Part, tier: Tier) -> None:
        """Record that a part has moved to ``tier``.

        A segment whose last part becomes GONE is removed, even if it has children.

        Raises:
            InvariantError: The segment is not known or has no such part; a user reads
                the part that moves; or the part was GONE: only ``add`` restores it.
        """
        segment = self._known(name)
        content = segment.content
        held = content.held(part)
        if held is None:
            raise InvariantError(f"segment {name} is whole: it has no draft KV")
        if held.tier is tier:
            return
        read = segment.in_use
        if read and content.draft is not None:
            read = segment.is_used(Use.DRAFT if part is Part.DRAFT else Use.RESIDUAL)
        if read:
            raise InvariantError(
                f"{part.value} of segment {name} moves from {held.tier.name} to "
                f"{tier.name}, but is used by {list(segment.users)}"
            )
        if held.tier is Tier.GONE:
            raise InvariantError(f"{part.value} of segment {name} is gone for good")
        moved = PlacedPart(held.nbytes, tier)
        if part is Part.DRAFT:
            content = replace(content, draft=moved)
        else:
            content = replace(content, residual=moved)
        if all(each.tier is Tier.GONE for _, each in content.parts):
            self._unlink(segment)
        else:
            self.update(name, content)

    def update(self, name: str, content: Content) -> None:
        """Record the parts of a segment as they are now, whoever uses it.

        Raises:
            InvariantError: The segment is not known.
        """
        segment = self._known(name)
        self._count(segment.content, -1)
        self._count(content, 1)
        segment.content = content
        self.columns.put(segment)

    def drop(self, name: str, *, strand: bool = False) -> None:
        """Remove a segment from the index; the KV it holds stays.

        Args:
            strand: Allow this although it has children, which cannot be matched until
                it is added again.

        Raises:
            InvariantError: It is not known or is in use, or it has children and
                ``strand`` is False.
        """
        segment = self._known(name)
        if segment.in_use:
            raise InvariantError(f"segment {name} is used by {list(segment.users)}")
        if name in self._children and not strand:
            raise InvariantError(
                f"segment {name} is followed by {self.children(name)}; dropping it "
                "strands them"
            )
        self._unlink(segment)

    # -- users ----------------------------------------------------------------

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the host pages of segments without users."""
        return self.host_bytes - self._used_bytes

    def hold(self, user: Hashable, uses: Mapping[str, int]) -> None:
        """Add a user to segments, or what it reads of them, until ``release``.

        Args:
            user: Request id, or a value of its own for an operation.
            uses: What it reads, by name of the segment.
        """
        names = self._names_of.setdefault(user, {})
        for name, use in uses.items():
            segment = self._recorded(name)
            self._set_use(segment, user, segment.users.get(user, Use.NONE) | use)
            if use & Use.DRAFT and name in self._drafts:
                self._drafts[name] = self._drafts.pop(name)
            names[name] = None
        if not names:
            del self._names_of[user]

    def release(self, user: Hashable, use: int = Use.ALL) -> list[str]:
        """End what a user reads, and remove it from segments of which it reads nothing.

        Returns:
            The segments that it used before.
        """
        names = self._names_of.get(user, {})
        before = list(names)
        for name in before:
            segment = self.find(name)
            left = segment.users[user] & ~use
            self._set_use(segment, user, left or None)
            if not left:
                del names[name]
            for form in list(segment.damaged):
                self.discard_image(name, form)
            self._prune(segment)
        if not names:
            self._names_of.pop(user, None)
        return before

    def _set_use(self, segment: Segment, user: Hashable, use: int | None) -> None:
        """Set what a user reads of a segment; None: it does not use it any more."""
        used, drafts = bool(segment.users), segment.is_used(Use.DRAFT)
        if use is None:
            del segment.users[user]
        else:
            segment.users[user] = use
        if bool(segment.users) is not used:
            self._used_bytes += -segment.host_bytes if used else segment.host_bytes
            if segment.name in self._segments:
                self.columns.put(segment)
        if segment.draft is not None and segment.is_used(Use.DRAFT) is not drafts:
            slots = len(segment.draft.slots)
            self.used_slots += -slots if drafts else slots
            self.idle_slots -= -slots if drafts else slots

    @contextmanager
    def used(self, uses: Mapping[str, int]) -> Iterator[None]:
        """Have an operation use segments within this context; see ``hold``."""
        user = object()
        self.hold(user, uses)
        try:
            yield
        finally:
            self.release(user)

    def users(self) -> list[Hashable]:
        """Return all users."""
        return list(self._names_of)

    # -- KV off the radix tree ------------------------------------------------

    def add_draft(self, name: str, part: SegmentDraft) -> None:
        """Add draft KV on the device, taking ownership of its slots.

        Raises:
            InvariantError: The segment has draft KV there.
        """
        if name in self._drafts:
            raise InvariantError(f"a second draft KV for segment {name}")
        with self._changed(name) as segment:
            segment.draft = part
        self._drafts[name] = None

    def remove_draft(self, name: str) -> SegmentDraft:
        """Remove draft KV from the device; the caller owns its slots now.

        Raises:
            InvariantError: A user reads it, or it is not there.
        """
        segment = self.find(name)
        part = segment.draft
        if part is None or segment.is_used(Use.DRAFT):
            raise InvariantError(f"the draft KV of segment {name} is not idle")
        with self._changed(name):
            segment.draft = None
        del self._drafts[name]
        return part

    def drafts(self) -> list[str]:
        """Return the segments with draft KV on the device, the latest used last."""
        return list(self._drafts)

    def add_image(self, name: str, form: Form, image: HostImage) -> None:
        """Add a host image, taking ownership of its pages; scores replace older ones.

        Raises:
            InvariantError: The segment has one, or a user reads the older scores; the
                pages of ``image`` are freed.
        """
        segment = self.find(name)
        if form in segment.images:
            if form is not Form.SCORES or segment.reads(form):
                image.free()
                raise InvariantError(f"a second image {form.name} of segment {name}")
            self.drop_image(name, form)
        with self._changed(name) as segment:
            segment.images[form] = image

    def settle_image(self, name: str, form: Form) -> None:
        """Free the pages that an image does not need, once it is sealed."""
        if self.find(name).images[form].sealed:
            with self._changed(name) as segment:
                segment.images[form].settle()

    def drop_image(self, name: str, form: Form) -> None:
        """Free a host image.

        Raises:
            InvariantError: A user reads it, or there is none.
        """
        segment = self.find(name)
        if form not in segment.images or segment.reads(form):
            raise InvariantError(f"image {form.name} of segment {name} is not idle")
        with self._changed(name):
            image = segment.images.pop(form)
            segment.damaged.discard(form)
        image.free()

    def discard_image(self, name: str, form: Form) -> None:
        """Free a corrupt host image once no user reads it; it is not found any more."""
        segment = self.find(name)
        segment.damaged.add(form)
        if not segment.reads(form):
            self.drop_image(name, form)

    def clear(self) -> None:
        """Forget everything and free all host pages; SGLang has freed all slots.

        Raises:
            InvariantError: A segment has a user.
        """
        if self._names_of:
            raise InvariantError(f"segments are used by {self.users()}")
        for segment in self._all():
            for image in segment.images.values():
                image.free()
        self._reset()

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
        self.columns.check(self._segments)
        self._check_held()

    def _check(self, segment: Segment) -> None:
        parent = None if segment.parent is None else self.get(segment.parent)
        before = parent.end if parent else segment.start
        if segment.start != (0 if segment.parent is None else before):
            raise InvariantError(f"segment {segment.name} starts at {segment.start}")
        places = {held.tier for _, held in segment.content.parts}
        if segment.uses < 1 or places == {Tier.GONE}:
            raise InvariantError(f"segment {segment.name} cannot be: {segment}")

    def _check_held(self) -> None:
        """Recount what segments hold, and their users."""
        nbytes, residual, slots, users = [0, 0], 0, [0, 0], set()
        for segment in self._all():
            for form, image in segment.images.items():
                held = image.held_bytes
                nbytes[bool(segment.users)] += held
                residual += held if form is Form.RESIDUAL else 0
                if image.pages is None or image.pages.freed:
                    raise InvariantError(
                        f"segment {segment.name}: its pages were freed"
                    )
            if segment.draft is not None:
                slots[segment.is_used(Use.DRAFT)] += len(segment.draft.slots)
            if segment.users:
                users |= {(user, segment.name) for user in segment.users}
        names = self._names_of.items()
        if users != {(user, name) for user, each in names for name in each}:
            raise InvariantError(f"segments have other users: {users}")
        found = (*nbytes, residual, *slots)
        counted = (
            *(self.evictable_bytes, self._used_bytes, self.residual_bytes),
            *(self.idle_slots, self.used_slots),
        )
        if found != counted:
            raise InvariantError(f"segments hold {found}, not {counted}")
        for segment in self._unlinked.values():
            if segment.empty or segment.content is not UNKNOWN:
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
        segment = self._unlinked.get(name) or Segment(name=name)
        segment.parent, segment.start, segment.content = parent, start, content
        segment.last_use, segment.uses, segment.stored = now, 1.0, False
        self.columns.enter(segment, self._children.get(name, ()))
        self._segments[name] = segment
        self._unlinked.pop(name, None)
        if parent is not None:
            self._children.setdefault(parent, {})[name] = None
        self._count(content, 1)

    def _known(self, name: str) -> Segment:
        segment = self._segments.get(name)
        if segment is None:
            raise InvariantError(f"segment {name} is not in the index")
        return segment

    def _all(self) -> Iterator[Segment]:
        yield from self._segments.values()
        yield from self._unlinked.values()

    def _note_use(self, segment: Segment, now: float) -> None:
        segment.uses = 1.0 + segment.uses_at(now, self.half_life_s)
        segment.last_use = max(now, segment.last_use)
        self.columns.use(segment)

    def _recorded(self, name: str) -> Segment:
        """Return the record of a segment, a new one if it is unknown."""
        segment = self.find(name)
        if name not in self._segments:
            self._unlinked[name] = segment
        return segment

    def _prune(self, segment: Segment) -> None:
        """Drop the record of a segment that holds nothing and is not in the index."""
        if segment.empty:
            self._unlinked.pop(segment.name, None)

    @contextmanager
    def _changed(self, name: str) -> Iterator[Segment]:
        """Return a segment whose KV changes within this context."""
        segment = self._recorded(name)
        self._tally(segment, -1)
        yield segment
        self._tally(segment, 1)
        self._prune(segment)

    def _tally(self, segment: Segment, by: int) -> None:
        """Add a segment to the totals of KV held (1), or take it out (-1)."""
        nbytes = by * segment.host_bytes
        self.host_bytes += nbytes
        self._used_bytes += nbytes if segment.users else 0
        if segment.residual is not None:
            self.residual_bytes += by * segment.residual.held_bytes
        if segment.draft is None:
            return
        if segment.is_used(Use.DRAFT):
            self.used_slots += by * len(segment.draft.slots)
        else:
            self.idle_slots += by * len(segment.draft.slots)

    def _unlink(self, segment: Segment) -> None:
        """Remove a segment from the index; it keeps its record if it holds KV."""
        name = segment.name
        del self._segments[name]
        self.columns.leave(name, self._children.get(name, ()))
        self._count(segment.content, -1)
        if segment.parent is not None:
            siblings = self._children[segment.parent]
            del siblings[name]
            if not siblings:
                del self._children[segment.parent]
        segment.content = UNKNOWN
        if not segment.empty:
            self._unlinked[name] = segment

    def _count(self, content: Content, by: int) -> None:
        for part, held in content.parts:
            total = self._totals[held.tier]
            total[0] += by * content.tokens_of(part)
            total[1] += by * held.nbytes
