"""Tracks which requests use cached segments, and evicts the others."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.counters import TierCounters
from vericache_sglang.prefix_cache.eviction import ranked, victims
from vericache_sglang.prefix_cache.index import SegmentIndex
from vericache_sglang.prefix_cache.segment import Content, Held, Part, Tier
from vericache_sglang.prefix_cache.segment_slots import SegmentSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.residual import RawResidual
    from vericache_sglang.prefix_cache.restore_costs import Prices
    from vericache_sglang.prefix_cache.segment_copies import SegmentCopies
    from vericache_sglang.prefix_cache.store.keys import Fingerprint
    from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments


MOST_STORED = 16_384
"""Most index entries of segments in the store only; others there are still found."""


class Identity(NamedTuple):
    """Identity of the model and compressor that segments belong to.

    Attributes:
        model: Fingerprint of the model and its KV.
        compressor: Identity of the compressor and its settings.
    """

    model: Fingerprint
    compressor: str


class SegmentRoom:
    """Tracks the tier of every segment, pins those in use and evicts others.

    Args:
        copies: Forms of segments off the radix tree.
        handles: Pool and geometry.
        identity: Model and compressor of this server's segments.
        free: Frees slots of draft KV in SGLang's allocator.
        prices: Returns the present costs of transfers and prefills.

    Attributes:
        stored: Segments in the store; None without a store.
    """

    def __init__(
        self,
        copies: SegmentCopies,
        handles: KVHandles,
        identity: Identity,
        free: Callable[[torch.Tensor], None],
        prices: Callable[[], Prices],
    ) -> None:
        self.copies = copies
        self.draft_pool = copies.draft_pool
        self.residuals = copies.residuals
        self.counters = TierCounters()
        self.stored: StoredSegments | None = None
        self._token_bytes = handles.geometry.token_bytes
        self._identity = identity
        self._prices = prices
        self._free = free
        self._index = SegmentIndex()
        self._slots = SegmentSlots(len(handles.pool.k_buffer[0]), handles.device)
        every = SEGMENT * self._token_bytes
        self._on_device = Content(tokens=SEGMENT, residual=Held(every, Tier.DEVICE))
        self._on_host = Content(tokens=SEGMENT, residual=Held(every, Tier.HOST))
        self._distrusted: set[str] = set()
        self._listing: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._referring: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._evictable: tuple[tuple[int, ...], int] = ((), 0)

    @contextmanager
    def kept_back(self, names: Sequence[str]) -> Iterator[None]:
        """Pin the existing parts of segments within this context."""
        pinned = [name for name in names if name in self._index]
        self._index.pin(pinned)
        try:
            with self.copies.kept_back(names):
                yield
        finally:
            self._index.unpin(pinned)

    # -- parts of running requests --------------------------------------------

    def open_residuals(
        self, names: Sequence[str], slots: int, kept: int
    ) -> dict[str, RawResidual] | None:
        """Allocate residual KV of segments, to be filled by the caller.

        Args:
            names: Segments without residual KV.
            slots: Dropped tokens of each segment.
            kept: Kept tokens of each segment.

        Returns:
            Residual KV by name; None without free host pages, and none was allocated.
        """
        opened: dict[str, RawResidual] = {}
        for name in names:
            found = self._open(name, slots, kept)
            if found is None:
                for other in opened:
                    self.residuals.drop(other)
                return None
            opened[name] = found
        return opened

    def _open(self, name: str, slots: int, kept: int) -> RawResidual | None:
        self._distrusted.discard(name)
        opened = self.copies.open_residual(name, slots, kept)
        if opened is None:
            self.make_room((slots + kept) * self._token_bytes)
            opened = self.copies.open_residual(name, slots, kept)
        return opened

    def save_scores(self, name: str, noted: torch.Tensor) -> None:
        """Save the scores [L, H, tokens] of a segment beside its new residual KV."""
        if not self.copies.save_scores(name, noted):
            self.make_room(noted.nbytes)
            self.copies.save_scores(name, noted)

    def use(self, rid: str, names: Sequence[str]) -> None:
        """Share the draft KV of segments with a request, until ``stop_listing``."""
        self.draft_pool.take(names)
        self._listing[rid] = tuple(names), self._pinned(names)

    def stop_listing(self, rid: str) -> None:
        """End ``use``, if the request has called it."""
        names, pinned = self._listing.pop(rid, ((), ()))
        self._index.unpin(pinned)
        self.draft_pool.give(names)

    def refer(self, rid: str, names: Sequence[str]) -> None:
        """Share the residual KV of segments with a request, until ``let_go``."""
        self.let_go(rid)
        self.residuals.hold(names)
        self._referring[rid] = tuple(names), self._pinned(names)

    def let_go(self, rid: str) -> None:
        """End ``refer``, if the request has called it."""
        names, pinned = self._referring.pop(rid, ((), ()))
        self._index.unpin(pinned)
        self.residuals.let_go(names)

    def release(self, rid: str) -> None:
        """End ``use`` and ``refer``; drop segments that the index has forgotten."""
        both = (self._listing.get(rid), self._referring.get(rid))
        names = {name for each in both if each for name in each[0]}
        self.stop_listing(rid)
        self.let_go(rid)
        for name in sorted(names):
            if name not in self._index or name in self._distrusted:
                self.forget(name)
            elif not self._is_split(name):
                # The index has learned of it in another form, as full KV of the tree.
                self.copies.drop_residual(name)

    def distrust(self, names: Sequence[str]) -> None:
        """Exclude segments from further use, because one of them is corrupt."""
        self._distrusted.update(names)

    def trusts(self, names: Sequence[str]) -> bool:
        """Return whether none of these segments is distrusted."""
        return self._distrusted.isdisjoint(names)

    # -- eviction -------------------------------------------------------------

    @property
    def evictable_bytes(self) -> int:
        """Bytes of host memory that ``make_room`` can free.

        A pinned segment stays as a whole: if a request uses its draft KV on the device,
        its residual KV on the host is not evictable either. Cached between changes,
        because every scheduler iteration reads it.
        """
        pending_max = self.copies.evictable_bytes
        state = (self._index.changes, self.copies.held_bytes, pending_max)
        if self._evictable[0] != state:
            stays = sum(map(self.copies.unused_bytes, self._index.pinned()))
            self._evictable = state, pending_max - stays
        return self._evictable[1]

    def make_room(self, nbytes: int) -> None:
        """Evict segments from the host.

        Args:
            nbytes: Bytes of host memory to free, or all that is evictable if less.
        """
        self._hear_store()
        now, prices = time.monotonic(), self._prices()
        moves = victims(self._index, Tier.HOST, nbytes, now, prices)
        for name, target in {m.name: m.target for m in moves}.items():
            self.counters.evicted_host_tokens += SEGMENT
            if target is Tier.STORE:
                self._leave_to_store(name)
            else:
                self.forget(name)
        known = self._index.total(Tier.STORE)
        too_many = known.tokens - MOST_STORED * SEGMENT
        if too_many > 0:
            nbytes = too_many * known.nbytes // known.tokens
            for move in victims(self._index, Tier.STORE, nbytes, now, prices):
                self.forget(move.name)

    def _leave_to_store(self, name: str) -> None:
        """Drop the copies of a stored segment, and record that the store has it."""
        part = self.draft_pool.get(name)
        needed = part is not None and part.users > 0
        if needed or name in self._slots or self.residuals.is_held(name):
            self.forget(name)  # a part is in use and stays
            return
        if part is not None:
            self._free(self.draft_pool.remove(name).slots)
        self.copies.drop_host(name)
        self._distrusted.discard(name)
        for kind in (Part.RESIDUAL, Part.DRAFT):
            if kind is Part.RESIDUAL or self._is_split(name):
                self._index.place(name, kind, Tier.STORE)

    def _hear_store(self) -> None:
        """Update the index with segments that appeared in or left the store."""
        for name, there in self.stored.changes() if self.stored is not None else ():
            segment = self._index.get(name)
            if segment is None:
                continue
            self._index.note_stored(name, there)
            if not there and segment.content.away and not segment.pins:
                self._index.drop(name, strand=True)

    def _know(self, name: str, parent: str | None, content: Content) -> None:
        """Add a segment to the index, or count a use of a known one."""
        self._index.add(name, parent, content, time.monotonic())
        self._hear_store()
        if self.stored is not None and name in self.stored:
            self._index.note_stored(name, True)

    def evict_drafts(self, slots: int) -> int:
        """Evict draft KV that no request uses from the device.

        Args:
            slots: Number of slots needed.

        Returns:
            Number of slots freed.
        """
        before = self.draft_pool.idle_slots
        left: list[torch.Tensor] = []
        with self.copies.together():
            for name in self._idle_drafts():
                if before - self.draft_pool.idle_slots >= slots:
                    break
                part = self.draft_pool.get(name)
                if part is not None and not part.users:
                    left += self._evict_draft(name)
        if left:
            self._free(torch.cat(left))
        return before - self.draft_pool.idle_slots

    def _idle_drafts(self) -> Iterator[str]:
        """Yield segments with evictable draft KV, those not in the index first."""
        now, prices = time.monotonic(), self._prices()
        for name in self.draft_pool.idle():
            segment = self._index.get(name)
            draft = segment.content.draft if segment and not segment.pins else None
            if draft is None or draft.tier is not Tier.DEVICE:
                yield name
        for _, moves in ranked(self._index, Tier.DEVICE, now, prices):
            yield from (move.name for move in moves if move.part is Part.DRAFT)

    def _evict_draft(self, name: str) -> list[torch.Tensor]:
        """Move draft KV to the host; drop it without residual KV or free host pages.

        Returns:
            Its slots, to be freed by the caller; empty if they are already free.
        """
        if not self._is_split(name):
            return [self.draft_pool.remove(name).slots]
        self._index.pin([name])
        slots = self._with_room(lambda: self.copies.save_draft(name))
        self._index.unpin([name])
        if slots is None:
            self._lose_draft(name)
            return []
        with self._shifted(name):
            self._index.place(name, Part.DRAFT, Tier.HOST)
        return [slots]

    def _with_room(self, attempt: Callable[[], Any]) -> Any:
        """Return the result of ``attempt``; on None, evict host KV and retry once."""
        made = attempt()
        if made is None:
            self.make_room(SEGMENT * self._token_bytes)
            made = attempt()
        return made

    def forget(self, name: str) -> None:
        """Drop all copies of a segment, unless a request has pinned it."""
        known = self._index.get(name)
        if known is not None and known.pins:
            return
        part = self.draft_pool.get(name)
        if part is not None and not part.users:
            self._free(self.draft_pool.remove(name).slots)
        self.copies.drop_host(name)
        if not self.copies.restorable(name):
            self._distrusted.discard(name)  # later copies are new
        segment = self._index.get(name)
        if segment is None:
            return
        self._index.drop(name, strand=True)
        if name in self._slots and (
            not segment.parent or segment.parent in self._index
        ):
            self._know(name, segment.parent, self._on_device)

    def check(self) -> None:
        """Recount the index and the residual KV.

        Raises:
            InvariantError: A count or link is inconsistent.
        """
        self._index.check()
        self.residuals.check(
            [name for names, _ in self._referring.values() for name in names]
        )

    def _content(self, kept: int, draft: Tier) -> Content:
        """Return the content of a compressed segment with residual KV on the host."""
        return Content(
            tokens=SEGMENT,
            residual=Held((SEGMENT - kept) * self._token_bytes, Tier.HOST),
            draft=Held(kept * self._token_bytes, draft),
            compressor=self._identity.compressor,
        )

    def _pinned(self, names: Sequence[str]) -> tuple[str, ...]:
        """Pin the compressed ones of these segments, and return their names."""
        split = tuple(name for name in names if self._is_split(name))
        self._index.pin(split)
        return split

    def _lose_draft(self, name: str) -> None:
        """Drop unused draft KV, and its segment unless a request has pinned it."""
        segment = self._index.get(name)
        if segment is None or not segment.pins:
            self.forget(name)
            return
        self._free(self.draft_pool.remove(name).slots)
        with self._shifted(name):
            self._index.place(name, Part.DRAFT, Tier.GONE)

    @contextmanager
    def _shifted(self, name: str) -> Iterator[None]:
        """Lift all pins of a segment within this context, to record a part's new tier.

        The requests that pinned the segment keep the part they use.
        """
        segment = self._index.get(name)
        pins = [name] * segment.pins if segment else []
        self._index.unpin(pins)
        yield
        self._index.pin(pins)

    def _is_split(self, name: str) -> bool:
        """Return whether a segment is compressed and not in the store only."""
        segment = self._index.get(name)
        if segment is None or segment.content.away:
            return False
        return segment.content.draft is not None
