"""Moves cached segments to lower tiers where a tier needs room."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import torch

from vericache_sglang.kv.plane_residual import PlaneResidual
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.counters import TierCounters
from vericache_sglang.prefix_cache.eviction import ranked, victims
from vericache_sglang.prefix_cache.segment import (
    Content,
    Form,
    Part,
    PlacedPart,
    Segment,
    Tier,
    Use,
)
from vericache_sglang.prefix_cache.segment_slots import SegmentSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.host_image import RawImage
    from vericache_sglang.prefix_cache.ranks import Ranks
    from vericache_sglang.prefix_cache.segment_copies import SegmentCopies
    from vericache_sglang.prefix_cache.store.keys import Fingerprint
    from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments

T = TypeVar("T")

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


class SegmentTiers:
    """Records the tier of every segment, and evicts segments without users.

    Args:
        copies: Forms of segments off the radix tree, and their records.
        handles: Pool and geometry.
        compressor: Identity of the compressor of this server's segments.
        free: Frees slots of draft KV in SGLang's allocator.
        ranks: Agrees with other ranks, and prices moves and prefills.
        contain: Context in which host memory is evicted, see
            ``CachedSegments.cache_only``.

    Attributes:
        slots: Segments in the radix tree.
        stored: Segments in the store; None without a store.
        on_device: Content of a segment with full KV in the radix tree.
        on_host: Content of a segment with full KV on the host.
    """

    def __init__(
        self,
        copies: SegmentCopies,
        handles: KVHandles,
        compressor: str,
        free: Callable[[torch.Tensor], None],
        ranks: Ranks,
        contain: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.stored: StoredSegments | None = None
        self.slots = SegmentSlots(len(handles.pool.k_buffer[0]), handles.device)
        self.counters = TierCounters()
        self._copies, self._index = copies, copies.index
        self._token_bytes = handles.geometry.token_bytes
        self._compressor = compressor
        self._free, self._ranks, self._contain = free, ranks, contain
        self._host = handles.host
        every = SEGMENT * self._token_bytes
        self.on_device = Content(
            tokens=SEGMENT, residual=PlacedPart(every, Tier.DEVICE)
        )
        self.on_host = Content(tokens=SEGMENT, residual=PlacedPart(every, Tier.HOST))

    def compressed(self, name: str, draft: Tier) -> Content:
        """Return the content of a compressed segment with residual KV on the host.

        Args:
            name: A segment with both parts.
            draft: Where its draft KV is, on the device or the host.
        """
        segment = self._index.find(name)
        part = segment.draft
        if draft is Tier.DEVICE and part is not None:
            slots = len(part.slots)
        else:
            slots = cast("RawImage", segment.images[Form.DRAFT]).slots
        return Content(
            tokens=SEGMENT,
            residual=PlacedPart(self._residual_bytes(segment), Tier.HOST),
            draft=PlacedPart(slots * self._token_bytes, draft),
            compressor=self._compressor,
        )

    def recount(self, name: str) -> None:
        """Record the size of residual planes that have been filled meanwhile."""
        segment = self._index.get(name)
        if segment is None or not isinstance(segment.residual, PlaneResidual):
            return
        if segment.content.draft is not None:
            nbytes = self._residual_bytes(segment)
            residual = replace(segment.content.residual, nbytes=nbytes)
            self._index.update(name, replace(segment.content, residual=residual))

    def _residual_bytes(self, segment: Segment) -> int:
        """Return the recorded bytes of residual KV on the host; frees pages it left.

        Residual planes that a transfer still fills count as much as they may become.
        """
        rest = segment.residual
        if rest is None:
            return 0  # which no part can be
        self._index.settle_image(segment.name, Form.RESIDUAL)
        if isinstance(rest, PlaneResidual) and not rest.sealed:
            return rest.held_bytes
        return rest.nbytes_layer * rest.layers

    # -- the index --------------------------------------------------------------

    def know(self, name: str, parent: str | None, content: Content) -> None:
        """Add a segment to the index, or count a use of a known one."""
        self._index.add(name, parent, content, self._ranks.now())
        self.poll_store()
        if self.stored is not None and name in self.stored:
            self._index.note_stored(name, True)

    def poll_store(self) -> None:
        """Update the index with segments that appeared in or left the store."""
        for name, there in self.stored.changes() if self.stored is not None else ():
            segment = self._index.get(name)
            if segment is None:
                continue
            self._index.note_stored(name, there)
            if not there and segment.content.away and not segment.users:
                self._index.drop(name, strand=True)

    def forget(self, name: str) -> None:
        """Drop a segment from index and store, and its KV; not if a user reads it."""
        segment = self._index.find(name)
        if not segment.in_use:
            if segment.draft is not None and not segment.is_used(Use.DRAFT):
                self._free(self._index.remove_draft(name).slots)
            self._copies.drop_host(name)
            if not segment.restorable:
                segment.distrusted = False  # later copies are new
            if name in self._index:
                parent = segment.parent
                self._index.drop(name, strand=True)
                if name in self.slots and (not parent or parent in self._index):
                    self.know(name, parent, self.on_device)
        if self.stored is not None and name not in self.slots:
            self.stored.forget(name)

    # -- the store --------------------------------------------------------------

    def write_whole(self, name: str, slots: torch.Tensor) -> None:
        """Queue a write of the full KV in ``slots``, unless a form is stored."""
        if self.stored is not None and self.stored.wants(name):
            self.stored.write(name, {"whole": self._copies.read_whole(slots)})

    def write_split(self, segment: Segment) -> None:
        """Queue a write of a compressed segment, unless both its parts are stored.

        Nothing is written while a transfer still fills the residual KV, as on a CUDA
        device just after compressing: the end of every use writes what is missing.
        """
        name, stored = segment.name, self.stored
        if stored is not None and segment.split and stored.wants(name, split=True):
            stored.write_split(name, self._copies.read_parts(name))

    # -- host memory ------------------------------------------------------------

    def make_room(self, nbytes: int) -> None:
        """Evict segments from the host; a failure disables the cache.

        Args:
            nbytes: Bytes of host memory to free, or all that is evictable if less.
        """
        with self._contain():
            self.poll_store()
            before = self._host.free_bytes
            self._ranks.agree_on_room()
            nbytes -= self._host.free_bytes - before
            now, prices = self._ranks.now(), self._ranks.prices(self.stored)
            moves = victims(self._index, Tier.HOST, nbytes, now, prices)
            for name, target in {m.name: m.target for m in moves}.items():
                self.counters.evicted_host_tokens += SEGMENT
                if target is Tier.STORE and name not in self.slots:
                    self._leave_to_store(name)
                else:
                    self.forget(name)
            known = self._index.total(Tier.STORE)
            too_many = known.tokens - MOST_STORED * SEGMENT
            if too_many > 0:
                nbytes = too_many * known.nbytes // known.tokens
                for move in victims(self._index, Tier.STORE, nbytes, now, prices):
                    self.forget(move.name)
            self._ranks.agree_on_room()

    def with_room(self, attempt: Callable[[], T], nbytes: int = 0) -> T:
        """Return the result of ``attempt``; if it fails, evict from the host and retry.

        Args:
            attempt: Returns None or False without free host pages.
            nbytes: Bytes to evict then; 0: those of a segment.
        """
        made = attempt()
        if made is None or made is False:
            self.make_room(nbytes or SEGMENT * self._token_bytes)
            made = attempt()
        return made

    def _leave_to_store(self, name: str) -> None:
        """Drop the copies of a stored segment, and record that the store has it."""
        segment = self._index.find(name)
        if segment.draft is not None:
            self._free(self._index.remove_draft(name).slots)
        self._copies.drop_host(name)
        segment.distrusted = False
        for kind, _ in segment.content.parts:
            self._index.place(name, kind, Tier.STORE)

    # -- draft KV on the device -------------------------------------------------

    def evict_drafts(self, slots: int) -> int:
        """Evict draft KV that no request uses from the device.

        Args:
            slots: Number of slots needed.

        Returns:
            Number of slots freed.
        """
        before = self._index.idle_slots
        left: list[torch.Tensor] = []
        with self._copies.batched_saves():
            for name in self._idle_drafts():
                if before - self._index.idle_slots >= slots:
                    break
                segment = self._index.find(name)
                if segment.draft is not None and not segment.is_used(Use.DRAFT):
                    left += self._evict_draft(name)
        if left:
            self._free(torch.cat(left))
        return before - self._index.idle_slots

    def _idle_drafts(self) -> Iterator[str]:
        """Yield segments with draft KV, those that ``ranked`` does not list first."""
        now, prices = self._ranks.now(), self._ranks.prices(self.stored)
        for name in self._index.drafts():
            segment = self._index.get(name)
            draft = segment.content.draft if segment and not segment.users else None
            if draft is None or draft.tier is not Tier.DEVICE:
                yield name
        for _, moves in ranked(self._index, Tier.DEVICE, now, prices):
            yield from (move.name for move in moves if move.part is Part.DRAFT)

    def _evict_draft(self, name: str) -> list[torch.Tensor]:
        """Move draft KV to the host; drop it without residual KV or free host pages.

        Returns:
            Its slots, to be freed by the caller; empty if they are already free.
        """
        segment = self._index.find(name)
        if not segment.split:
            return [self._index.remove_draft(name).slots]
        with self._index.used({name: Use.NONE}):
            slots = self.with_room(lambda: self._copies.save_draft(name))
        if slots is not None:
            self._index.place(name, Part.DRAFT, Tier.HOST)
            return [slots]
        if not segment.users:
            self.forget(name)
            return []
        self._index.place(name, Part.DRAFT, Tier.GONE)
        return [self._index.remove_draft(name).slots]
