"""Cached prefixes below SGLang's radix tree: registration, saving and restoring."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from vericache_sglang.errors import TransferError
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.index import SegmentIndex
from vericache_sglang.prefix_cache.segment import Part, Tier
from vericache_sglang.prefix_cache.segment_copies import joined
from vericache_sglang.prefix_cache.segment_room import SegmentRoom
from vericache_sglang.prefix_cache.store.counters import StoreCounters
from vericache_sglang.prefix_cache.store.keys import segment_names

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator, Sequence

    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.residual import RawResidual
    from vericache_sglang.prefix_cache.restore_costs import Prices
    from vericache_sglang.prefix_cache.segment import Content
    from vericache_sglang.prefix_cache.segment_copies import SegmentCopies
    from vericache_sglang.prefix_cache.segment_images import DraftPart
    from vericache_sglang.prefix_cache.segment_room import Identity
    from vericache_sglang.prefix_cache.store.segment_store import Found

    Namespace = tuple[str | None, ...]
    Tokens = Sequence[int] | array[int]

logger = logging.getLogger(__name__)

MOST_LOGGED = 10
"""Most failures of the cache that are logged; all are counted."""


class CachedSegments(SegmentRoom):
    """Segments of the radix tree and segments evicted from it, by name.

    The radix tree owns segments with full KV on the device; only their slots are
    recorded here, to detect evictions from them. Evicted segments can be restored from
    their copies, for the radix tree or for a compressed request.

    Args:
        copies: Forms of segments off the radix tree.
        handles: Pool and geometry.
        identity: Model and compressor of this server's segments.
        free: Frees slots of draft KV in SGLang's allocator.
        prices: Returns the present costs of transfers and prefills.
        reprefill_tail: See the attribute.

    Attributes:
        active: A radix tree uses this cache, and no inconsistency was found.
        strict: Raise on an inconsistency, for tests, instead of continuing without the
            cache.
        kept: Tokens per head in the draft KV of a compressed segment, which is stored
            in two parts; 0: segments are not compressed.
        reprefill_tail: Last tokens of every prompt to recompute although cached.
    """

    def __init__(
        self,
        copies: SegmentCopies,
        handles: KVHandles,
        identity: Identity,
        free: Callable[[torch.Tensor], None],
        prices: Callable[[], Prices],
        reprefill_tail: int = 0,
    ) -> None:
        super().__init__(copies, handles, identity, free, prices)
        self.active = False
        self.strict = True
        self._abandoned = False
        self.kept = 0
        self.reprefill_tail = reprefill_tail

    # -- inconsistencies -------------------------------------------------------

    @contextmanager
    def cache_only(self) -> Iterator[None]:
        """Contain a failure that affects cached prefixes, but no output token.

        The cache is disabled until SGLang's caches are flushed; running requests keep
        the KV they use.
        """
        try:
            yield
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if self.strict:
                raise
            self.counters.inconsistencies += 1
            if self.counters.inconsistencies <= MOST_LOGGED:
                logger.exception("VeriCache: cached prefixes are dropped: %s", error)
            self.abandon()

    @property
    def abandoned(self) -> bool:
        """Whether an inconsistency was found since the last flush."""
        return self._abandoned

    def abandon(self) -> None:
        """Disable the cache until SGLang's caches are flushed."""
        self._abandoned = self._abandoned or self.active
        self.active = False

    def make_room(self, nbytes: int) -> None:
        """See ``SegmentRoom.make_room``; a failure disables the cache."""
        with self.cache_only():
            super().make_room(nbytes)

    # -- names and matching ---------------------------------------------------

    def names(self, namespace: Namespace, tokens: Tokens) -> list[str]:
        """Return the names of the whole segments of a token sequence.

        Args:
            namespace: Values that requests must have in common to share KV.
            tokens: Token ids from the start of the prompt.
        """
        return segment_names(self._identity.model, namespace, tokens, SEGMENT)

    def reach(self, names: Sequence[str], start: int) -> int:
        """Return the end of the prefix that can be restored, in tokens.

        Args:
            names: Names of the prompt's whole segments.
            start: Tokens already on the device; may be inside a segment.
        """
        stop = first = start // SEGMENT
        while stop < len(names) and self._trusted(names[stop]):
            stop += 1
        return stop * SEGMENT if stop > first else start

    # -- parts of segments ------------------------------------------------------

    def draft(self, name: str) -> DraftPart | None:
        """Return a segment's draft KV on the device, or None."""
        return self.draft_pool.get(name)

    def add_draft(self, name: str, part: DraftPart) -> None:
        """Add draft KV without users, taking ownership of its slots.

        Raises:
            InvariantError: The segment has draft KV on the device.
        """
        self.draft_pool.add(name, part)

    def residual(self, name: str) -> RawResidual | None:
        """Return a segment's residual KV on the host, or None."""
        return self.residuals.get(name)

    def drop_residual(self, name: str) -> None:
        """Free a segment's residual KV.

        Raises:
            InvariantError: A request uses it, or it is not on the host.
        """
        self.residuals.drop(name)

    @property
    def used_slots(self) -> int:
        """Slots of draft KV that requests use."""
        return self.draft_pool.used_slots

    @property
    def idle_slots(self) -> int:
        """Slots of draft KV that no request uses, which can be evicted."""
        return self.draft_pool.idle_slots

    # -- events of the radix tree ---------------------------------------------

    def register(self, names: Sequence[str], slots: torch.Tensor) -> None:
        """Register the segments of a prefix that the radix tree owns now.

        Args:
            names: Names of its whole segments.
            slots: [T] integers, slots of its tokens in order; T >= ``len(names)``
                segments.
        """
        self._slots.enter(names, slots)
        if not self.kept:
            for at, name in enumerate(names):
                self._write(name, slots[at * SEGMENT : (at + 1) * SEGMENT])
        now = time.monotonic()
        for at, name in enumerate(names):
            known = self._index.get(name)
            if known is None or known.content.away:
                self._know(name, names[at - 1] if at else None, self._on_device)
            else:
                self._index.touch([name], now)

    def leaving(self, slots: torch.Tensor) -> None:
        """Save the segments that contain ``slots``, which the tree is about to free."""
        with self.copies.together():
            for segment in self._slots.leave(slots):
                self._leave(*segment)

    def _leave(self, name: str, parent: str | None, own: torch.Tensor) -> None:
        """Save an evicted segment to the host unless it has copies; see ``leaving``."""
        self.counters.evicted_device_tokens += SEGMENT
        self._write(name, own)
        if parent is not None and parent not in self._index:
            self.forget(name)  # no match can reach it without its parent
            return
        if self.copies.restorable(name) or name in self.residuals:
            self._catch_up(name)
            return
        if name not in self._index:
            return
        self._index.pin([name])
        saved = self._with_room(partial(self._save, name, own))
        self._index.unpin([name])
        if saved is None:
            self.counters.refused_segments += 1
            self.forget(name)
        elif name in self.residuals:
            self.settle([name])
        else:
            with self._shifted(name):
                self._index.place(name, Part.RESIDUAL, Tier.HOST)

    def _catch_up(self, name: str) -> None:
        """Update the tier of a segment with copies that has just left the device."""
        segment = self._index.get(name)
        if segment is None or segment.pins:
            return
        if segment.content.residual.tier is Tier.DEVICE:
            if self.copies.has_whole(name):
                self._index.place(name, Part.RESIDUAL, Tier.HOST)
            else:
                self.settle([name])

    def forget(self, name: str) -> None:
        """See ``SegmentRoom.forget``; also forgets that the store has the segment."""
        super().forget(name)
        if self.stored is not None and name not in self._slots:
            self.stored.forget(name)

    def keep(self, names: Sequence[str], first: int, slots: torch.Tensor) -> None:
        """Save segments to the host that are not inserted into the radix tree.

        Args:
            names: Names of a request's whole segments.
            first: Index of the first new segment.
            slots: [n] int64, slots of the new segments' tokens in order.
        """
        for at in range(first, len(names)):
            name, parent = names[at], names[at - 1] if at else None
            if name in self._slots or self.copies.restorable(name):
                continue
            if parent is not None and parent not in self._index:
                return
            own = slots[(at - first) * SEGMENT : (at - first + 1) * SEGMENT]
            attempt = partial(self._save, name, own)
            if not self._enter_host(name, parent, attempt, self._on_host):
                return
            self._write(name, own)

    def _enter_host(
        self,
        name: str,
        parent: str | None,
        attempt: Callable[[], bool | None],
        content: Content,
    ) -> bool:
        """Copy a segment to the host and index it, without evicting its parent.

        Args:
            name: The segment.
            parent: Its parent, which is in the index; None for a root segment.
            attempt: Copies it; returns True, or None without free host pages.
            content: Its content after the copy.

        Returns:
            False without free host pages.
        """
        with self.kept_back([] if parent is None else [parent]):
            if self._with_room(attempt) is None:
                return False
        self._know(name, parent, content)
        return True

    def _write(self, name: str, slots: torch.Tensor) -> None:
        """Write a segment to the store, if there is one and it lacks the segment."""
        if self.stored is not None and self.stored.wants(name):
            self.stored.write(name, {"whole": self.copies.read_whole(slots)})

    def take_in(self, name: str, parent: str | None, found: Found) -> bool:
        """Copy a segment that was read from the store to the host.

        Args:
            name: The segment.
            parent: Its parent; None for a root segment.
            found: Its verified parts.

        Returns:
            Whether the segment is cached now. False without free host pages, if its
            parent is not in the index, or if a request holds its residual KV alone.
        """
        if parent is not None and parent not in self._index:
            return False
        if name in self._slots or self.copies.restorable(name):
            return True
        if name in self.residuals:  # in use, without draft KV
            return False
        parts, kept = found.parts, found.manifest.kept
        ours = self.stored is not None and self.stored.usable(found)
        # With another page size, the number of kept tokens may differ.
        if ours and kept == self.kept:
            attempt = partial(
                self.copies.take_split, name, parts["draft"], parts["residual"]
            )
            content = self._content(kept, Tier.HOST)
        else:
            whole = parts.get("whole") or joined(parts["draft"], parts["residual"])
            attempt = partial(self.copies.take_whole, name, whole)
            content = self._on_host
        try:
            taken = self._enter_host(name, parent, lambda: attempt() or None, content)
        except Exception:
            self.forget(name)  # its partial copies
            raise
        if taken:
            self.counters.match_store_tokens += SEGMENT
        return taken

    def _save(self, name: str, slots: torch.Tensor) -> bool | None:
        """Save a segment's full KV to the host, or its residual KV if it has draft KV.

        Returns:
            True, or None without free host pages.
        """
        part = self.draft_pool.get(name)
        if part is None:
            return self.copies.save_whole(name, slots) or None
        return self.copies.save_rest(name, part, slots) or None

    # -- restoring ------------------------------------------------------------

    def restore(
        self, names: Sequence[str], start: int, slots: torch.Tensor
    ) -> str | None:
        """Restore full KV of a prefix into slots of the device.

        Args:
            names: Names of the prompt's whole segments, protected by ``kept_back``.
            start: Position of the first token to restore.
            slots: [n] int64, destinations of the next n tokens, which end at the end of
                a segment.

        Returns:
            None, or the name of a segment with a corrupt copy: the contents of
            ``slots`` are invalid then, and the segment is not restored again.
        """
        began = time.perf_counter()
        at, stop = start, start + len(slots)
        while at < stop:
            end = min(stop, (at // SEGMENT + 1) * SEGMENT)
            name, own = names[at // SEGMENT], slots[at - start : end - start]
            try:
                self.copies.restore(name, at % SEGMENT, own)
            except TransferError as error:
                logger.error("VeriCache: a cached prefix is computed again: %s", error)
                self.counters.checksum_failures += 1
                self._distrusted.add(name)
                return name
            at = end
        self.counters.note_restored(
            len(slots), len(slots) * self._token_bytes, time.perf_counter() - began
        )
        return None

    # -- compressed segments -----------------------------------------------------

    def settle(self, names: Sequence[str]) -> None:
        """Record the segments that have both draft KV and residual KV now.

        Redundant host copies of full KV and draft KV are dropped.

        Args:
            names: Consecutive segments, outside ``kept_back``.
        """
        for at, name in enumerate(names):
            part, rest = self.draft_pool.get(name), self.residuals.get(name)
            if part is None or rest is None:
                continue
            known = self._index.get(name)
            parent = known.parent if known else names[at - 1] if at else None
            if parent is not None and parent not in self._index:
                continue
            content = self._content(len(part.slots), Tier.DEVICE)
            with self._shifted(name):
                self._know(name, parent, content)
                self._index.place(name, Part.DRAFT, Tier.DEVICE)
            if self.stored is not None and self.stored.wants(name, split=True):
                parts = self.copies.read_parts(name)
                if parts is not None:
                    draft, residual = parts
                    self.stored.write(name, {"draft": draft, "residual": residual})
            self.copies.drop_copies(name)

    def close(self) -> None:
        """Write the device segments to the store that it lacks, and wait for this."""
        if self.stored is None:
            return
        for segment in self._slots.all():
            self._write(segment.name, segment.slots)
        self.stored.close()

    def leave_store(self) -> None:
        """Stop using the store; queued writes are still completed."""
        if self.stored is not None:
            logger.warning("VeriCache: new weights, the store is not used any more")
            self.stored.close()
            self.stored = None
            for segment in list(self._index.segments()):
                if segment.content.away and not segment.pins:
                    self._index.drop(segment.name, strand=True)

    def forget_users(self) -> None:
        """Reset all uses by requests, for when none is running."""
        self._listing.clear()
        self._referring.clear()
        self.draft_pool.forget_users()
        self.residuals.forget_users()

    def clear(self) -> None:
        """Clear the cache; SGLang has freed every slot, and no request is running."""
        self.copies.clear()
        self._index = SegmentIndex()
        self._slots.clear()
        self._distrusted.clear()
        self.active, self._abandoned = self.active or self._abandoned, False

    def report(self) -> dict[str, int | float]:
        """Return the totals of each tier, and the counters."""
        self._hear_store()
        host, below = self._index.total(Tier.HOST), self._index.total(Tier.STORE)
        return {
            "cache_segments": len(self._index),
            "cache_device_tokens": len(self._slots) * SEGMENT,
            "cache_draft_slots": self.draft_pool.used_slots
            + self.draft_pool.idle_slots,
            "cache_draft_slots_used": self.draft_pool.used_slots,
            "cache_host_tokens": host.tokens,
            "cache_host_bytes": host.nbytes,
            "cache_store_tokens": below.tokens,
            "cache_store_bytes": below.nbytes,
            "cache_complement_bytes": self.residuals.used_bytes,
            **(self.stored.report() if self.stored else StoreCounters().report()),
            **self.counters.report(),
        }

    def _trusted(self, name: str) -> bool:
        return name not in self._distrusted and self.copies.restorable(name)
