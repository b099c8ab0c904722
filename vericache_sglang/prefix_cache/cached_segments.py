"""Cached prefixes below SGLang's radix tree: registration, saving and restoring."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.segment import Form, Part, Tier, Use
from vericache_sglang.prefix_cache.segment_tiers import SegmentTiers
from vericache_sglang.prefix_cache.store.counters import StoreCounters
from vericache_sglang.prefix_cache.store.keys import segment_names
from vericache_sglang.prefix_cache.whole_segments import WholeSegments

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator, Sequence

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.residual import HostResidual
    from vericache_sglang.prefix_cache.ranks import Ranks
    from vericache_sglang.prefix_cache.segment_copies import SegmentCopies
    from vericache_sglang.prefix_cache.segment_images import SegmentDraft
    from vericache_sglang.prefix_cache.segment_tiers import Identity
    from vericache_sglang.prefix_cache.store.found import Found
    from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments

    Namespace = tuple[str | None, ...]
    Tokens = Sequence[int] | array[int]

logger = logging.getLogger(__name__)

MOST_LOGGED = 10
"""Most failures of the cache that are logged; all are counted."""


class CachedSegments:
    """Segments of the radix tree and segments evicted from it, by name.

    The radix tree owns segments with full KV on the device; only their slots are
    recorded here, to detect evictions from them. Evicted segments can be restored from
    their copies, for the radix tree or for a compressed request.

    Args:
        copies: Forms of segments off the radix tree.
        handles: Pool and geometry.
        identity: Model and compressor of this server's segments.
        free: Frees slots of draft KV in SGLang's allocator.
        ranks: Agrees with other ranks.
        reprefill_tail: See the attribute.

    Attributes:
        wholes: Full KV of segments on the host, which running requests share.
        active: A radix tree uses this cache, and no inconsistency was found.
        strict: Raise on an inconsistency, for tests, instead of continuing without the
            cache.
        failed: Called with an inconsistency if there are other ranks: all of them have
            to forget what is cached.
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
        ranks: Ranks,
        reprefill_tail: int = 0,
    ) -> None:
        self.copies = copies
        self._ranks = ranks
        self._index = copies.index
        self._identity = identity
        self._token_bytes = handles.geometry.token_bytes
        self._tiers = SegmentTiers(
            copies,
            handles,
            identity.compressor,
            free,
            ranks,
            self.cache_only,
        )
        self._slots = self._tiers.slots
        self.counters = self._tiers.counters
        self.wholes = WholeSegments(copies, self._tiers)
        self.forget = self._tiers.forget
        self.make_room = self._tiers.make_room
        self.evict_drafts = self._tiers.evict_drafts
        self.add_draft = self._index.add_draft
        self.active = False
        self.strict = True
        self.failed: Callable[[Exception], None] | None = None
        self._abandoned = False
        self.kept = 0
        self.reprefill_tail = reprefill_tail

    @property
    def shares_full_kv(self) -> bool:
        """Whether requests may share full KV on the host.

        Not with several ranks: each would share what is intact on it.
        """
        return self.active and self._ranks.alone

    # -- inconsistencies -------------------------------------------------------

    @contextmanager
    def cache_only(self) -> Iterator[None]:
        """Contain a failure that affects cached prefixes, but no output token.

        The cache is disabled until SGLang's caches are flushed; running requests keep
        the KV they use. With other ranks, whose cache would match more than this one,
        the failure is one of all requests.
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
            if self.failed is None or self._ranks.alone:
                self.abandon()
            else:
                self.failed(error)

    @property
    def abandoned(self) -> bool:
        """Whether an inconsistency was found since the last flush."""
        return self._abandoned

    def abandon(self) -> None:
        """Disable the cache until SGLang's caches are flushed."""
        self._abandoned = self._abandoned or self.active
        self.active = False

    def check(self) -> None:
        """Recount all segments.

        Raises:
            InvariantError: A count or link is inconsistent.
        """
        self._index.check()

    @property
    def stored(self) -> StoredSegments | None:
        """Segments in the store; None without a store."""
        return self._tiers.stored

    @stored.setter
    def stored(self, stored: StoredSegments | None) -> None:
        self._tiers.stored = stored

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

    # -- users ------------------------------------------------------------------

    @contextmanager
    def kept_back(self, names: Sequence[str]) -> Iterator[None]:
        """Protect segments, and the KV they hold now, within this context."""
        with self._index.used({name: self._index.find(name).held for name in names}):
            yield

    def use(self, rid: str, names: Sequence[str]) -> None:
        """Share the draft KV of segments with a request, until ``stop_listing``.

        Raises:
            InvariantError: A segment has no draft KV on the device.
        """
        self._hold(rid, names, Use.DRAFT)

    def refer(self, rid: str, names: Sequence[str], use: Use = Use.RESIDUAL) -> None:
        """Share KV of segments on the host with a request, until ``stop_referring``.

        Args:
            rid: Request id.
            use: RESIDUAL for residual KV, IMAGES for full KV.

        Raises:
            InvariantError: A segment has none on the host.
        """
        self._hold(rid, names, use)

    def _hold(self, rid: str, names: Sequence[str], use: Use) -> None:
        if not all(self._index.find(name).held & use for name in names):
            raise InvariantError(f"{rid} uses {use.name} KV that segments do not have")
        self._index.hold(rid, dict.fromkeys(names, use))

    def stop_listing(self, rid: str) -> None:
        """End ``use``, if the request has called it."""
        self._end(rid, Use.DRAFT)

    def stop_referring(self, rid: str) -> None:
        """End ``refer``, if the request has called it."""
        self._end(rid, Use.RESIDUAL | Use.IMAGES)

    def release(self, rid: str) -> None:
        """End ``use`` and ``refer``."""
        self._end(rid, Use.ALL)

    def _end(self, rid: str, use: int) -> None:
        """End what a request reads; drop KV that the index does not list any more."""
        for name in self._index.release(rid, use):
            segment = self._index.find(name)
            if segment.is_used(Use.RESIDUAL):
                continue
            if name in self._index and not segment.split:
                # The index has learned of it in another form, as full KV of the tree.
                self.copies.drop_residual(name)
            if not segment.users and (name not in self._index or segment.distrusted):
                self.forget(name)
            else:
                self._tiers.write_split(segment)

    def forget_users(self) -> None:
        """Reset all uses, for when no request is running after an error."""
        for user in self._index.users():
            self._index.release(user)
        if self.stored is not None and not self._ranks.alone:
            self.stored.forget_ranks()

    def distrust(self, names: Sequence[str]) -> None:
        """Exclude segments from further use, because one of them is corrupt."""
        for name in names:
            self._index.find(name).distrusted = True

    def trusts(self, names: Sequence[str]) -> bool:
        """Return whether none of these segments is distrusted."""
        return not any(self._index.find(name).distrusted for name in names)

    # -- draft KV and residual KV -------------------------------------------------

    def draft(self, name: str) -> SegmentDraft | None:
        """Return a segment's draft KV on the device, or None."""
        return self._index.find(name).draft

    def residual(self, name: str) -> HostResidual | None:
        """Return a segment's residual KV on the host, or None."""
        return self._index.find(name).residual

    def drop_residual(self, name: str) -> None:
        """Free residual KV; see ``SegmentIndex.drop_image``."""
        self._index.drop_image(name, Form.RESIDUAL)

    @property
    def used_slots(self) -> int:
        """Slots of draft KV that requests use."""
        return self._index.used_slots

    @property
    def idle_slots(self) -> int:
        """Slots of draft KV that no request uses, which can be evicted."""
        return self._index.idle_slots

    @property
    def evictable_bytes(self) -> int:
        """Bytes of host memory that ``make_room`` can free; O(1)."""
        return self._index.evictable_bytes

    def open_residuals(
        self, names: Sequence[str], budget: Budget
    ) -> dict[str, HostResidual] | None:
        """Allocate residual KV of segments, to be filled by the caller.

        Args:
            names: Segments without residual KV.
            budget: Counts of each segment.

        Returns:
            Residual KV by name; None without free host pages, and none was allocated.
        """
        opened: dict[str, HostResidual] = {}
        for name in names:
            attempt = partial(self.copies.open_residual, name, budget)
            found = self._tiers.with_room(attempt, budget.offered * self._token_bytes)
            if found is None:
                for other in opened:
                    self.drop_residual(other)
                return None
            self._index.find(name).distrusted = False
            opened[name] = found
        return opened

    def save_scores(self, name: str, noted: torch.Tensor) -> None:
        """Save the scores [L, H, tokens] of a segment beside its new residual KV."""
        attempt = partial(self.copies.save_scores, name, noted)
        self._tiers.with_room(attempt, noted.nbytes)

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
                self._tiers.write_whole(name, slots[at * SEGMENT : (at + 1) * SEGMENT])
        now = self._ranks.now()
        for at, name in enumerate(names):
            known = self._index.get(name)
            if known is None or known.content.away:
                parent = names[at - 1] if at else None
                self._tiers.know(name, parent, self._tiers.on_device)
            else:
                self._index.touch([name], now)

    def leaving(self, slots: torch.Tensor) -> None:
        """Save the segments that contain ``slots``, which the tree is about to free."""
        left = self._slots.leave(slots)
        with self.copies.batched_saves():
            for segment in left:
                self._leave(*segment)
        for name, *_ in left:
            self._tiers.recount(name)

    def _leave(self, name: str, parent: str | None, own: torch.Tensor) -> None:
        """Save an evicted segment to the host unless it has copies; see ``leaving``."""
        self.counters.evicted_device_tokens += SEGMENT
        self._tiers.write_whole(name, own)
        if parent is not None and parent not in self._index:
            self.forget(name)  # no match can reach it without its parent
            return
        segment = self._index.find(name)
        if segment.residual is not None or segment.restorable:
            self._update_tier(name)
            return
        if name not in self._index:
            return
        # Without its parent no match could reach it.
        needed = [name] if parent is None else [parent, name]
        with self._index.used(dict.fromkeys(needed, Use.NONE)):
            saved = self._tiers.with_room(partial(self._save, name, own))
        if not saved:
            self.counters.refused_segments += 1
            self.forget(name)
        elif self.residual(name) is not None:
            self.settle([name])
        else:
            self._index.update(name, self._tiers.on_host)

    def _update_tier(self, name: str) -> None:
        """Update the tier of a segment with copies that has just left the device."""
        segment = self._index.get(name)
        if segment is None or segment.in_use:
            return
        if segment.content.residual.tier is Tier.DEVICE:
            if segment.has(Form.WHOLE):
                self._index.place(name, Part.RESIDUAL, Tier.HOST)
            else:
                self.settle([name])

    def keep(self, names: Sequence[str], first: int, slots: torch.Tensor) -> None:
        """Save segments to the host that are not inserted into the radix tree.

        Args:
            names: Names of a request's whole segments.
            first: Index of the first new segment.
            slots: [n] int64, slots of the new segments' tokens in order.
        """
        for at in range(first, len(names)):
            name, parent = names[at], names[at - 1] if at else None
            segment = self._index.find(name)
            # What is found corrupt on one rank may be restorable on others.
            if name in self._slots or segment.restorable or segment.distrusted:
                continue
            if parent is not None and parent not in self._index:
                return
            own = slots[(at - first) * SEGMENT : (at - first + 1) * SEGMENT]
            attempt = partial(self._save, name, own)
            if not self._enter_host(name, parent, attempt, split=False):
                return
            self._tiers.write_whole(name, own)

    def _enter_host(
        self,
        name: str,
        parent: str | None,
        attempt: Callable[[], bool],
        *,
        split: bool,
    ) -> bool:
        """Copy a segment to the host and index it, without evicting its parent.

        Args:
            parent: Its parent, which is in the index; None for a root segment.
            attempt: Copies it; returns False without free host pages.
            split: It copies draft KV and residual KV.

        Returns:
            False without free host pages.
        """
        with self.kept_back([] if parent is None else [parent]):
            if not self._tiers.with_room(attempt):
                return False
        content = self._tiers.compressed(name, Tier.HOST) if split else None
        self._tiers.know(name, parent, content or self._tiers.on_host)
        return True

    def take_in(self, name: str, parent: str | None, found: Found) -> bool:
        """Copy a segment that was read from the store to the host.

        Args:
            parent: Its parent; None for a root segment.
            found: Its verified parts.

        Returns:
            Whether the segment is cached now. False without free host pages, if its
            parent is not in the index, or if a request holds its residual KV alone.
        """
        if parent is not None and parent not in self._index:
            return False
        if name in self._slots or self._trusted(name):
            return True
        if self.residual(name) is not None:  # in use, without draft KV
            return False
        parts, tokens = found.parts, found.manifest.tokens
        split = self.stored is not None and self.stored.usable(found)
        if split:
            both = parts["draft"], parts["residual"]
            attempt = partial(self.copies.take_split, name, *both, tokens)
        else:
            whole = parts.get("whole") or self.copies.joined(
                parts["draft"], parts["residual"], tokens
            )
            attempt = partial(self.copies.take_whole, name, whole)
        try:
            taken = self._enter_host(name, parent, attempt, split=split)
        except Exception:
            self.forget(name)  # its partial copies
            raise
        if taken:
            self.counters.match_store_tokens += SEGMENT
        return taken

    def _save(self, name: str, slots: torch.Tensor) -> bool:
        """Save a segment's full KV to the host, or its residual KV if it has draft KV.

        Returns:
            False without free host pages.
        """
        part = self.draft(name)
        if part is None:
            return self.copies.save_whole(name, slots)
        return self.copies.save_rest(name, part, slots)

    # -- restoring ------------------------------------------------------------

    def restore(
        self, names: Sequence[str], start: int, slots: torch.Tensor
    ) -> list[str]:
        """Restore full KV of a prefix into slots of the device.

        Args:
            names: Names of the prompt's whole segments, protected by ``kept_back``.
            start: Position of the first token to restore.
            slots: [n] int64, destinations of the next n tokens, which end at the end of
                a segment.

        Returns:
            Names of segments with a corrupt copy on any rank, to be forgotten outside
            ``kept_back``. If there are any, the contents of ``slots`` are invalid.
        """
        began = time.perf_counter()
        first, stop = start // SEGMENT, start + len(slots)
        at, corrupt = start, -1
        try:
            while at < stop:
                end = min(stop, (at // SEGMENT + 1) * SEGMENT)
                own = slots[at - start : end - start]
                self.copies.restore(names[at // SEGMENT], at % SEGMENT, own)
                at = end
        except TransferError as error:
            logger.error("VeriCache: a cached prefix is computed again: %s", error)
            corrupt = at // SEGMENT - first
        except Exception:
            self._ranks.fail()
            raise
        found = sorted({each for each in self._ranks.every(corrupt) if each >= 0})
        if found:
            self.counters.checksum_failures += 1
            damaged = [names[first + each] for each in found]
            self.distrust(damaged)
            return damaged
        self.counters.note_restored(
            len(slots), len(slots) * self._token_bytes, time.perf_counter() - began
        )
        return []

    # -- compressed segments -----------------------------------------------------

    def settle(self, names: Sequence[str]) -> None:
        """Record the segments that have both draft KV and residual KV now.

        Redundant host copies of full KV and draft KV are dropped.

        Args:
            names: Consecutive segments, outside ``kept_back``.
        """
        for at, name in enumerate(names):
            part, rest = self.draft(name), self.residual(name)
            if part is None or rest is None:
                continue
            known = self._index.get(name)
            parent = known.parent if known else names[at - 1] if at else None
            if parent is not None and parent not in self._index:
                continue
            content = self._tiers.compressed(name, Tier.DEVICE)
            self._tiers.know(name, parent, content)
            self._index.update(name, content)
            self._tiers.write_split(self._index.find(name))
            self.copies.drop_copies(name)

    def close(self) -> None:
        """Write the segments to the store that it lacks, and wait for this."""
        if self.stored is None:
            return
        for entry in self._slots.all():
            self._tiers.write_whole(entry.name, entry.slots)
        for segment in self._index.segments():
            self._tiers.write_split(segment)
        self.stored.close()

    def leave_store(self) -> None:
        """Stop using the store; queued writes are still completed."""
        if self.stored is not None:
            logger.warning("VeriCache: new weights, the store is not used any more")
            self.stored.close()
            self.stored = None
            for segment in list(self._index.segments()):
                if segment.content.away and not segment.users:
                    self._index.drop(segment.name, strand=True)

    def clear(self) -> None:
        """Clear the cache; SGLang has freed every slot, and no request is running."""
        self._index.clear()
        self._slots.clear()
        self.active, self._abandoned = self.active or self._abandoned, False

    def report(self) -> dict[str, int | float]:
        """Return the totals of each tier, and the counters."""
        self._tiers.poll_store()
        host, below = self._index.total(Tier.HOST), self._index.total(Tier.STORE)
        return {
            "cache_segments": len(self._index),
            "cache_device_tokens": len(self._slots) * SEGMENT,
            "cache_draft_slots": self.used_slots + self.idle_slots,
            "cache_draft_slots_used": self.used_slots,
            "cache_host_tokens": host.tokens,
            "cache_host_bytes": host.nbytes,
            "cache_store_tokens": below.tokens,
            "cache_store_bytes": below.nbytes,
            "cache_residual_bytes": self._index.residual_bytes,
            **(self.stored.report() if self.stored else StoreCounters().report()),
            **self.counters.report(),
        }

    def _trusted(self, name: str) -> bool:
        segment = self._index.find(name)
        return segment.restorable and not segment.distrusted
