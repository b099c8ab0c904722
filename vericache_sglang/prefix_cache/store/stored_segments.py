"""Cached segments in the store: written in the background, fetched for requests."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice, takewhile
from math import isfinite
from operator import and_, attrgetter
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.store.fetches import Fetch, Read, Rest
from vericache_sglang.prefix_cache.store.manifest import Recent
from vericache_sglang.prefix_cache.store.objects import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from vericache_sglang.prefix_cache.store.found import Found, StoreFetch
    from vericache_sglang.prefix_cache.store.objects import Part, Tensors
    from vericache_sglang.prefix_cache.store.segment_store import SegmentStore

logger = logging.getLogger(__name__)

LONGEST_S = 5.0
"""Seconds a request waits for the store before missing tokens are prefilled, unless to
wait on is predicted to take less time."""
AHEAD_BYTES = 256 << 20
"""Most bytes read ahead for a request before they are copied to the host tier."""
MOST_FETCHES = 4096
"""Most concurrent fetches; a further one cancels the oldest."""
MOST_KNOWN = 65_536
"""Most segments remembered as stored, the latest ones: 33 million tokens."""
MOST_AT_ONCE = 48
"""Most segments of a fetch that are read before some are copied, and most ended writes
that ranks tell at once: their bits are exact in a float64."""
MOST_WRITING = 128
"""Most writes, dropped ones included, on whose outcome the ranks have not agreed."""
PARTS: tuple[Part, Part] = ("draft", "residual")
"""The two parts of a stored segment."""
MOST_TOLD = 14
"""Most fetches that ranks tell at once, the oldest ones."""


@dataclass(slots=True)
class PendingWrite:
    """A write of a segment.

    Attributes:
        name: The segment; "" once it is forgotten.
        split: In draft KV and residual KV.
        future: Whether it is stored; None: the write was dropped.
    """

    name: str
    split: bool
    future: Future[bool] | None

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.future is None or self.future.done()

    @property
    def made(self) -> bool:
        """Whether an ended write has stored the segment."""
        future = self.future
        return future is not None and not future.cancelled() and future.result()


class StoredSegments:
    """Writes segments to the store once, and reads them for waiting requests.

    Only the scheduler's thread may call it; only ``close`` waits for the store. Several
    ranks make the same calls. What has been read and written is told by ``tell``, and
    counts for all ranks from the next ``receive`` on, as far as all of them have it.

    Args:
        compressor: Identity of the compressor of this server's draft KV.
        keep: Copies a segment to the host tier, given its name, its parent and the
            parts found; returns False without free host pages.
        better: Compressors whose stored draft KV is preferred to this server's.
        segment: Tokens of a segment.
        kept: Returns the tokens a head keeps in draft KV that is usable; None: any
            number.

    Attributes:
        alone: There is one rank: what it has read and written counts at once.
        awaits_whole: Every request waits as after ``await_whole`` (path B2).
        draft_first: Request of which the next ``fetch`` reads draft KV alone.
        prefill_s: Predicted seconds of a prefill: of the number of tokens that is the
            second argument, behind as many as the first; set after construction.
    """

    def __init__(
        self,
        store: SegmentStore,
        compressor: str,
        keep: Callable[[str, str | None, Found], bool],
        better: Sequence[str] = (),
        segment: int = SEGMENT,
        kept: Callable[[], int] | None = None,
    ) -> None:
        self.alone = True
        self.awaits_whole = False
        self.draft_first = ""
        self.prefill_s: Callable[[int, int], float] = lambda before, tokens: 0.0
        self._kept = kept
        self._store = store
        self._compressor = compressor
        self._usable = (*better, compressor)
        self._keep = keep
        self._segment = segment
        fields = layout(store.fingerprint, "whole", segment, 0).values()
        self._segment_bytes = sum(field.nbytes for field in fields)
        most = AHEAD_BYTES // self._segment_bytes
        self._ahead = min(max(1, most), MOST_AT_ONCE)
        self._fetches: dict[str, Fetch] = {}
        self._rests: dict[str, Rest] = {}
        # Most seconds that a request waits for its next fetch.
        self._waits: Recent[float] = Recent(MOST_FETCHES)
        # Name -> whether it is stored in two parts.
        self._there: Recent[bool] = Recent(MOST_KNOWN)
        # In order, which is also that of their ends.
        self._writing: list[PendingWrite] = []
        self._changes: deque[tuple[str, bool]] = deque(maxlen=MOST_KNOWN)

    # -- what ranks agree on ----------------------------------------------------

    def tell(self) -> list[float]:
        """Return what this rank has written and read since the last ``receive``."""
        fetches = self._open_fetches()
        told: list[float] = [*self._ended_writes(), len(fetches)]
        for fetch in fetches:
            told += self._read_of(fetch)
        return told

    def receive(self, rows: Sequence[Sequence[float]]) -> None:
        """Take over what all ranks have written and read.

        Args:
            rows: ``tell`` of every rank.

        Raises:
            InvariantError: The ranks have started different fetches.
        """
        fetches = self._open_fetches()
        ended, made, counts, *reads = zip(*(map(int, row) for row in rows), strict=True)
        if set(counts) != {len(fetches)}:
            raise InvariantError(f"ranks fetch {counts}, this one {len(fetches)}")
        self._end_writes(min(ended), reduce(and_, made))
        for i, fetch in enumerate(fetches):
            read, *bits = reads[4 * i : 4 * i + 4]
            if min(read) >= 0:
                fetch.agreed = Read(min(read), *(reduce(and_, each) for each in bits))

    def forget_ranks(self) -> None:
        """Forget what ranks may not have agreed on, after an error of one of them."""
        for rid in list(self._fetches):
            self.pop(rid)
        self._writing.clear()
        self._there.clear()
        self._changes.clear()

    def _open_fetches(self) -> list[Fetch]:
        """Return the oldest fetches on which the ranks have not agreed."""
        each = (
            fetch
            for fetch in self._fetches.values()
            if fetch.reading is not None and fetch.agreed is None
        )
        return list(islice(each, MOST_TOLD))

    def _read_of(self, fetch: Fetch) -> Read:
        """Return what this rank has read for a fetch, which ends when it is late."""
        reading = fetch.reading
        if reading is None:
            return Read(0)
        if not reading.done:
            if not self._is_late(fetch, len(reading.found)):
                return Read(-1)
            reading.cancelled = True
        found = list(reading.found)
        usable = sum(self.usable(each) << i for i, each in enumerate(found))
        whole = sum(("whole" in each.parts) << i for i, each in enumerate(found))
        scored = sum(_scored(each) << i for i, each in enumerate(found))
        return Read(len(found), usable, whole, scored)

    def _is_late(self, fetch: Fetch, read: int) -> bool:
        """Return whether a fetch of which ``read`` segments are here waits no longer.

        Behind its deadline it goes on while the store reads, if all that is being read
        is predicted to be here before a prefill of what is missing would be done.
        """
        now = time.monotonic()
        if now < fetch.deadline:
            return False
        before = fetch.start + fetch.tokens + read * self._segment
        missing = (len(fetch.names) - read) * self._segment
        stands_still = now - self._store.pace.read_at > LONGEST_S
        return stands_still or self.prefill_s(before, missing) <= self.whole_s(0)

    # -- contents of the store ------------------------------------------------

    def __contains__(self, name: object) -> bool:
        """Return whether the store has a segment, as of the last ``changes``."""
        return name in self._there

    def changes(self) -> list[tuple[str, bool]]:
        """Return changes since the last call: names, and whether the store has them."""
        self._poll()
        found = list(self._changes)
        self._changes.clear()
        return found

    def forget(self, name: str) -> None:
        """Forget that the store has a segment; nothing is deleted from the store."""
        self._there.pop(name, None)
        self._ignore_writes(name)

    def _ignore_writes(self, name: str) -> None:
        """Let earlier writes of a segment end without an effect."""
        for write in self._writing:
            if write.name == name:
                write.name = ""

    @property
    def s_per_byte(self) -> float:
        """Measured seconds per byte of a fetch; ``inf`` before the first one."""
        return self._store.pace.s_per_byte

    @property
    def token_s(self) -> float:
        """Measured seconds per token of full KV; ``inf`` before the first fetch."""
        return self.s_per_byte * self._segment_bytes / self._segment

    # -- writing --------------------------------------------------------------

    def wants(self, name: str, split: bool = False) -> bool:
        """Return whether the store is not known to have a segment.

        Args:
            split: Require draft KV and residual KV; False: any form counts.
        """
        self._poll()
        forms = [write.split for write in self._writing if write.name == name]
        forms += [self._there[name]] if name in self._there else []
        return True not in forms and (split or False not in forms)

    def write(self, name: str, parts: Mapping[Part, Tensors]) -> None:
        """Queue a write of a segment; ``parts`` must not change afterwards."""
        self._poll()
        self._ignore_writes(name)
        if len(self._writing) >= MOST_WRITING:
            self._store.counters.add(dropped_writes=1)
            return
        split = "whole" not in parts
        compressor = self._compressor if split else ""
        future = self._store.put_later(name, parts, compressor)
        self._writing.append(PendingWrite(name, split, future))

    def write_split(self, name: str, parts: tuple[Tensors, Tensors] | None) -> None:
        """Queue a write of a segment in two parts.

        Args:
            parts: Its draft KV and residual KV, which must not change afterwards; None
                if this rank cannot read them now, so that no rank stores it.
        """
        if parts is None and len(self._writing) < MOST_WRITING:
            self._writing.append(PendingWrite(name, True, None))
        elif parts is not None:
            self.write(name, dict(zip(PARTS, parts, strict=True)))

    def _poll(self) -> None:
        """End the writes that have ended, if there is no other rank to agree with."""
        if self.alone:
            self._end_writes(*self._ended_writes())

    def _ended_writes(self) -> tuple[int, int]:
        """Return how many of the first writes have ended, and bits of those made."""
        ended = islice(takewhile(attrgetter("ended"), self._writing), MOST_AT_ONCE)
        made = [write.made for write in ended]
        return len(made), sum(each << i for i, each in enumerate(made))

    def _end_writes(self, count: int, made: int) -> None:
        """End the first ``count`` writes; bit i of ``made``: write i stored it."""
        ended, self._writing = self._writing[:count], self._writing[count:]
        for i, write in enumerate(ended):
            if write.name and made >> i & 1:
                self._note(write.name, write.split)

    def _note(self, name: str, split: bool) -> None:
        self._there[name] = split
        self._changes.append((name, True))

    # -- reading --------------------------------------------------------------

    def fetch(self, rid: str, names: Sequence[str], start: int) -> None:
        """Start to read the segments that follow the cached tokens of a prompt.

        Args:
            rid: Waiting request.
            names: Names of its prompt's whole segments.
            start: Tokens of the prompt that are already cached.
        """
        first = start // self._segment
        if first >= len(names) or rid in self._fetches:
            return
        drafts = rid == self.draft_first and not first
        if self.awaits_whole:
            self.await_whole(rid, self.whole_s(len(names) - first))
        if len(self._fetches) >= MOST_FETCHES:
            self.pop(next(iter(self._fetches)))
        self._fetches[rid] = Fetch(
            names=names[first:],
            parent=names[first - 1] if first else None,
            start=first * self._segment,
            deadline=time.monotonic() + self._waits.pop(rid, LONGEST_S),
            reading=self._read_drafts(names) if drafts else self._read(names[first:]),
            drafts=drafts,
        )

    def drafted(self) -> list[str]:
        """Return the waiting requests whose draft KV has been read."""
        return [
            rid
            for rid, fetch in self._fetches.items()
            if fetch.drafts and (fetch.reading is None or fetch.reading.done)
        ]

    def drafts_of(self, rid: str) -> tuple[Sequence[str], list[Found]]:
        """Return the names of a prompt's segments, and the draft KV read of the first.

        Args:
            rid: One of ``drafted``.
        """
        fetch = self._fetches[rid]
        found = [] if fetch.reading is None else fetch.reading.found
        return fetch.names, list(takewhile(self.usable, found))

    def rest_s(self, drafts: Sequence[Found]) -> float:
        """Return when residual KV would be here that is read from now on, in seconds.

        Args:
            drafts: Its segments.
        """
        return (self._queued_bytes + _residual_bytes(drafts)) * self.s_per_byte

    def whole_s(self, segments: int) -> float:
        """Return when full KV would be here that is read from now on, in seconds.

        Args:
            segments: Stored segments that are not here, >= 0.
        """
        return (self._queued_bytes + segments * self._segment_bytes) * self.s_per_byte

    def draft_s(self, segments: int, part: float) -> float:
        """Return the same for draft KV, whose bytes are ``part`` of those of full KV.

        Args:
            segments: Stored segments, >= 1.
            part: > 0.
        """
        nbytes = (self._queued(drafts=True) + segments) * self._segment_bytes * part
        return nbytes * self.s_per_byte

    def await_whole(self, rid: str, seconds: float) -> None:
        """Let a request's next ``fetch`` take twice ``seconds``, or ``LONGEST_S``."""
        self._waits[rid] = _longest_wait(seconds)

    @property
    def _queued_bytes(self) -> int:
        """Bytes of reads of residual and full KV that have not ended."""
        rests = sum(rest.nbytes for rest in self._rests.values())
        return rests + self._queued(drafts=False) * self._segment_bytes

    def _queued(self, *, drafts: bool) -> int:
        """Return the segments whose draft KV, or full KV, is being read."""
        fetches = self._fetches.values()
        reading = (each for each in fetches if each.reading and each.drafts == drafts)
        return sum(len(each.names) for each in reading)

    def start_early(self, rid: str, drafts: Sequence[Found]) -> Rest:
        """Read the residual KV of a request that drafts.

        Args:
            rid: The request; one of ``drafted`` is read no further.
            drafts: Its first segments, from ``drafts_of``.

        Returns:
            The read, which ``pop`` ends.
        """
        self._fetches.pop(rid, None)
        nbytes = _residual_bytes(drafts)
        names = [each.manifest.name for each in drafts]
        for name in names:
            self._note(name, True)
        wait_s = _longest_wait(self.rest_s(drafts))
        rest = Rest(names, self._store.follow_up(drafts), nbytes, wait_s)
        self._rests[rid] = rest
        return rest

    def read_whole(self, rid: str) -> None:
        """Read both parts for a waiting request that does not start early."""
        fetch = self._fetches[rid]
        if fetch.reading is not None:
            fetch.reading.cancelled = True
        fetch.drafts, fetch.reading = False, self._read(fetch.names)
        fetch.deadline = time.monotonic() + LONGEST_S

    def found(self, rid: str) -> int | None:
        """Return how many segments ``take`` can copy for a request now.

        Returns:
            Number of leading segments that were read; None while more may arrive before
            the deadline; 0 when the fetch has ended.
        """
        fetch = self._fetches.get(rid)
        if fetch is None or fetch.reading is None:
            return 0
        if fetch.drafts:
            if time.monotonic() >= fetch.deadline:
                self.read_whole(rid)
            return None
        if self.alone:
            read = self._read_of(fetch)
            fetch.agreed = read if read.segments >= 0 else None
        return None if fetch.agreed is None else fetch.agreed.segments

    def take(self, rid: str, count: int) -> bool:
        """Copy found segments to the host tier; invalid content does not raise.

        Args:
            rid: Waiting request.
            count: Leading segments to copy, at most ``found``.

        Returns:
            True if the request no longer has to wait; False while more is being read.
        """
        fetch = self._fetches.get(rid)
        if fetch is None or fetch.reading is None:
            return True
        reading, fetch.reading = fetch.reading, None
        reading.cancelled = True
        agreed, fetch.agreed = fetch.agreed or Read(0), None
        for i, name in enumerate(reading.names[:count]):
            found = reading.found[i]
            # In a form, and of a size, that all ranks can copy alike.
            if not agreed.usable >> i & 1:
                made = replace(found.manifest, compressor="")
                found = replace(found, manifest=made)
            if not (agreed.scored & (agreed.usable | agreed.whole)) >> i & 1:
                found = replace(found, parts=_unscored(found.parts))
            if not self._take_in(name, fetch.parent, found):
                return True
            fetch.tokens += self._segment
            fetch.parent = name
        fetch.names = fetch.names[count:]
        if count < len(reading.names):
            self._changes.append((fetch.names[0], False))
            for name in fetch.names:
                self._there.pop(name, None)
        elif fetch.names:
            fetch.reading = self._read(fetch.names)
        return fetch.reading is None

    def usable(self, found: Found) -> bool:
        """Return whether this server can use a segment in two parts.

        A compressor that it accepts made them, and heads keep as many tokens: with
        another page size the number may differ.
        """
        made = found.manifest
        fits = self._kept is None or made.kept == self._kept()
        return made.compressor in self._usable and fits

    def pop(self, rid: str) -> tuple[int, int | None]:
        """End a fetch; return the number of tokens fetched, and where they begin."""
        rest = self._rests.pop(rid, None)
        if rest is not None:
            rest.reading.cancelled = True
        fetch = self._fetches.pop(rid, None)
        if fetch is not None and fetch.reading is not None:
            fetch.reading.cancelled = True
        if fetch is None or not fetch.tokens:
            return 0, None
        return fetch.tokens, fetch.start

    def close(self) -> None:
        """Complete queued writes, and refuse further ones."""
        self._store.close()

    def report(self) -> dict[str, int]:
        """Return the store's counters, by their names in the worker's report."""
        return self._store.counters.report(self._store.waiting)

    def _read(self, names: Sequence[str]) -> StoreFetch:
        return self._store.prefetch(names[: self._ahead], self._usable)

    def _read_drafts(self, names: Sequence[str]) -> StoreFetch:
        """Read as much draft KV ahead as full KV, in bytes."""
        kept = self._kept() if self._kept else self._segment
        most = self._ahead * self._segment // max(1, kept)
        return self._store.prefetch(names[:most], self._usable, "draft")

    def _take_in(self, name: str, parent: str | None, found: Found) -> bool:
        """Copy a segment to the host tier; False on a failure or without free pages."""
        try:
            if found.manifest.tokens != self._segment:
                raise ValueError(f"of {found.manifest.tokens} tokens")
            kept = self._keep(name, parent, found)
        except Exception as error:
            logger.exception("VeriCache: a stored segment cannot be used: %s", error)
            self._store.refuse(found)
            self._there.pop(name, None)
            if not self.alone:
                raise  # other ranks may have taken it in
            return False
        self._note(name, self.usable(found))
        return kept


def _longest_wait(predicted_s: float) -> float:
    return max(LONGEST_S, 2.0 * predicted_s if isfinite(predicted_s) else 0.0)


def _residual_bytes(drafts: Sequence[Found]) -> int:
    return sum(each.manifest.objects["residual"].nbytes for each in drafts)


def _scored(found: Found) -> bool:
    """Return whether a segment has the scores of its tokens."""
    return any("noted" in tensors for tensors in found.parts.values())


def _unscored(parts: Mapping[Part, Tensors]) -> dict[Part, Tensors]:
    """Return the parts of a segment without scores."""
    return {
        part: {field: each for field, each in tensors.items() if field != "noted"}
        for part, tensors in parts.items()
    }
