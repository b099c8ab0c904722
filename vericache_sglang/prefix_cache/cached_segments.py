"""Cached prefixes below SGLang's tree: what is where, and what gives way."""

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
    from vericache_sglang.prefix_cache.restore_costs import Prices
    from vericache_sglang.prefix_cache.segment import Content
    from vericache_sglang.prefix_cache.segment_copies import SegmentCopies
    from vericache_sglang.prefix_cache.segment_room import Identity
    from vericache_sglang.prefix_cache.store.segment_store import Found

    Namespace = tuple[str | None, ...]
    Tokens = Sequence[int] | array[int]

logger = logging.getLogger(__name__)

MOST_LOGGED = 10
"""Failures of the cache that are logged; all are counted."""


class CachedSegments(SegmentRoom):
    """Whole segments: by name those of the radix tree, and what left it.

    A segment on the device is the radix tree's; only its slots are known here, so that
    an eviction that cuts into it is noticed. What left can be brought back from its
    copies, for the radix tree or for a request that drafts.

    Args:
        copies: Where they are, off the tree.
        handles: Pool and geometry.
        identity: What other servers' segments differ in.
        free: Gives slots of draft parts back to SGLang.
        prices: Returns what moves and prefills cost now.

    Attributes:
        active: There is a radix tree that fills it, and all adds up.
        strict: Raise what does not add up, as tests want it, instead of going on.
        kept: Tokens of a segment that stay where it is split, and then stored in two
            parts; 0: segments are not split.
        reprefill_tail: Last tokens of every prompt that are to run again.
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

    # -- what does not add up --------------------------------------------------

    @contextmanager
    def cache_only(self) -> Iterator[None]:
        """Go on after a failure that can cost cached prefixes, and no token.

        They are not used any more until SGLang's caches are flushed; what runs keeps
        what it lists.
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
        """Whether something did not add up since the last flush."""
        return self._abandoned

    def abandon(self) -> None:
        """Use no cached prefix from now on until SGLang's caches are flushed."""
        self._abandoned = self._abandoned or self.active
        self.active = False

    def make_room(self, nbytes: int) -> None:
        """See ``SegmentRoom.make_room``; without room a move is put off."""
        with self.cache_only():
            super().make_room(nbytes)

    # -- names, and how far they reach ----------------------------------------

    def names(self, namespace: Namespace, tokens: Tokens) -> list[str]:
        """Return the names of the whole segments of a text.

        Args:
            namespace: What requests must have in common to share KV.
            tokens: Token ids from the beginning.
        """
        return segment_names(self._identity.model, namespace, tokens, SEGMENT)

    def reach(self, names: Sequence[str], start: int) -> int:
        """Return the token up to which a text can be brought back.

        Args:
            names: Of its whole segments.
            start: Tokens the device has; the first segment may be cut by it.
        """
        stop = first = start // SEGMENT
        while stop < len(names) and self._trusted(names[stop]):
            stop += 1
        return stop * SEGMENT if stop > first else start

    # -- the radix tree tells -------------------------------------------------

    def register(self, names: Sequence[str], slots: torch.Tensor) -> None:
        """Name a prefix that the tree owns now.

        Args:
            names: Of its whole segments.
            slots: [T] integers, its tokens in order; at least those segments.
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
        """Copy the segments to the host that are about to lose a slot of the device."""
        with self.copies.together():
            for segment in self._slots.leave(slots):
                self._leave(*segment)

    def _leave(self, name: str, parent: str | None, own: torch.Tensor) -> None:
        """Copy a segment to the host where it is worth it; see ``leaving``."""
        self.counters.evicted_device_tokens += SEGMENT
        self._write(name, own)
        if parent is not None and parent not in self._index:
            self.forget(name)  # nothing leads to it any more
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
        """Have the index say where a segment is that has just left the device."""
        segment = self._index.get(name)
        if segment is None or segment.pins:
            return
        if segment.content.residual.tier is Tier.DEVICE:
            if self.copies.has_whole(name):
                self._index.place(name, Part.RESIDUAL, Tier.HOST)
            else:
                self.settle([name])

    def forget(self, name: str) -> None:
        """See ``SegmentRoom.forget``; also that the store has it."""
        super().forget(name)
        if self.stored is not None and name not in self._slots:
            self.stored.forget(name)

    def keep(self, names: Sequence[str], first: int, slots: torch.Tensor) -> None:
        """Copy segments to the host that the tree does not get.

        Args:
            names: Of a text's whole segments.
            first: The first of them that is new.
            slots: [n] int64, the new ones' tokens in order.
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
        """Bring a segment to the host and know it, without losing what it follows.

        Args:
            name: The segment.
            parent: The one before it, which is known; None for the first.
            attempt: Copies it; returns True, or None without room.
            content: What the host has of it then.

        Returns:
            False without room.
        """
        with self.kept_back([] if parent is None else [parent]):
            if self._with_room(attempt) is None:
                return False
        self._know(name, parent, content)
        return True

    def _write(self, name: str, slots: torch.Tensor) -> None:
        """Have a segment written to the store, where it is not."""
        if self.stored is not None and self.stored.wants(name):
            self.stored.write(name, {"whole": self.copies.read_whole(slots)})

    def take_in(self, name: str, parent: str | None, found: Found) -> bool:
        """Take in what the store had of a segment.

        Args:
            name: The segment.
            parent: The one before it, None for the first.
            found: What was read of it, checked.

        Returns:
            False without room, or where the one before it is not known.
        """
        if parent is not None and parent not in self._index:
            return False
        if name in self._slots or self.copies.restorable(name):
            return True
        if name in self.residuals:  # somebody's, without a draft part
            return False
        parts, kept = found.parts, found.manifest.kept
        ours = self.stored is not None and self.stored.usable(found)
        # Of other pages another count may have been kept.
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
            self.forget(name)  # what was copied before it failed
            raise
        if taken:
            self.counters.match_store_tokens += SEGMENT
        return taken

    def _save(self, name: str, slots: torch.Tensor) -> bool | None:
        """Copy a segment to the host, without what a draft part holds of it.

        Returns:
            True, or None without room.
        """
        part = self.draft_pool.get(name)
        if part is None:
            return self.copies.save_whole(name, slots) or None
        return self.copies.save_rest(name, part, slots) or None

    # -- bringing back --------------------------------------------------------

    def restore(
        self, names: Sequence[str], start: int, slots: torch.Tensor
    ) -> str | None:
        """Write a text's tokens back into slots of the device.

        Args:
            names: Of the text's whole segments, kept back.
            start: First token to write.
            slots: [n] int64, one for each of the next tokens, ending with a segment.

        Returns:
            None, or the segment of which a copy is damaged: what was written into
            ``slots`` means nothing then, and the segment is not restored again.
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

    # -- what is split now -------------------------------------------------------

    def settle(self, names: Sequence[str]) -> None:
        """Record the segments that have a draft part and a complement now.

        Copies on the host that say the same are given up.

        Args:
            names: Consecutive, nothing of them kept back.
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
        """Write what is only on the device to the store, and wait for it."""
        if self.stored is None:
            return
        for segment in self._slots.all():
            self._write(segment.name, segment.slots)
        self.stored.close()

    def leave_store(self) -> None:
        """Neither read nor write the store any more; what waits is still written."""
        if self.stored is not None:
            logger.warning("VeriCache: new weights, the store is not used any more")
            self.stored.close()
            self.stored = None
            for segment in list(self._index.segments()):
                if segment.content.away and not segment.pins:
                    self._index.drop(segment.name, strand=True)

    def forget_users(self) -> None:
        """No request lists or refers to anything any more, whatever is counted."""
        self._listing.clear()
        self._referring.clear()
        self.draft_pool.forget_users()
        self.residuals.forget_users()

    def clear(self) -> None:
        """Forget everything; SGLang has taken back every slot, and nothing runs."""
        self.copies.clear()
        self._index = SegmentIndex()
        self._slots.clear()
        self._distrusted.clear()
        self.active, self._abandoned = self.active or self._abandoned, False

    def report(self) -> dict[str, int | float]:
        """Return what each tier holds, and the counters."""
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
