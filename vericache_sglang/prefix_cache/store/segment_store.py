"""Writes, finds, reads, upgrades and copies segments in a store."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from vericache_sglang.errors import InvariantError, StoreError
from vericache_sglang.prefix_cache.store.found import Found, StoreFetch
from vericache_sglang.prefix_cache.store.keys import Seal
from vericache_sglang.prefix_cache.store.manifest import (
    FORMS,
    Manifest,
    Manifests,
    Stored,
)
from vericache_sglang.prefix_cache.store.objects import (
    coded_of,
    decode,
    encode,
    layout,
    memory_of,
    most_bytes,
)
from vericache_sglang.prefix_cache.store.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from vericache_sglang.prefix_cache.store.backend import Backend
    from vericache_sglang.prefix_cache.store.keys import Fingerprint
    from vericache_sglang.prefix_cache.store.objects import (
        Part,
        TensorField,
        Tensors,
    )

    Compress: TypeAlias = Callable[[Found], tuple[Tensors, Tensors]]

BATCH = 64
"""Segments looked up in one bounded call: 32,768 tokens."""
MOST_SALTS = 8
"""Most attempts to write an object, under another key after each corrupt copy."""


@dataclass(frozen=True, slots=True, eq=False)
class StoreCodec:
    """The codec of this server's packed draft KV.

    Attributes:
        identity: ``codec_identity``; segments of another one are not read.
        tokens: Tokens of a segment that it has packed.
        check: Called with draft KV and residual KV as they are stored, or with draft KV
            alone, in the thread that has read them; raises StoreError.
    """

    identity: str
    tokens: int
    check: Callable[[Tensors, Tensors | None], None]


class SegmentStore:
    """Segments of one model in a storage backend. Thread-safe.

    No method raises because of the backend: an unreadable segment counts as missing and
    a failed write is dropped; both are counted. An object's key is the digest of its
    content, and a manifest that lists it is written last, so readers see complete
    segments only, with any number of concurrent writers. HiCache's interface has no
    delete: replaced objects remain until the backend evicts them.

    Each rank has a store for its own heads (the rank is part of the fingerprint); ranks
    must use the minimum of their numbers of segments.

    Args:
        backend: The storage backend.
        fingerprint: Identity of the KV, with the key of the seals. New weights need a
            new store.
        most_waiting: Most pending segments of ``put_later``, and most pending
            prefetches.

    Attributes:
        counters: Counters of this store and its backend.
        pace: Measured speed of ``restore``.
        codec: What packed draft KV is written and read with; None: it is neither.
    """

    def __init__(
        self, backend: Backend, fingerprint: Fingerprint, most_waiting: int = 64
    ) -> None:
        self.fingerprint = fingerprint
        self.counters = backend.counters
        self.pace = Pace()
        self.codec: StoreCodec | None = None
        self._backend = backend
        self._manifests = Manifests(backend, fingerprint)
        self._unusable = self._manifests.unusable
        self._seal = Seal(fingerprint.key)
        self._most_waiting = most_waiting
        self._writer = ThreadPoolExecutor(1, "store-writer")
        self._reader = ThreadPoolExecutor(1, "store-reader")
        self._writes: set[Future[bool]] = set()
        self._reads: set[Future[None]] = set()

    # -- writing ----------------------------------------------------------------

    def put(
        self, name: str, parts: Mapping[Part, Tensors], compressor: str = ""
    ) -> bool:
        """Store a segment in one form; its parts become readable together.

        Nothing is written if the same form by the same compressor exists: KV of the
        same tokens differs in rounding at most.

        Args:
            name: The segment's name.
            parts: ``whole`` alone, or ``draft`` and ``residual`` of the same KV, see
                ``layout``. Never store KV restored from a lossy part as ``whole``.
            compressor: ``compressor_identity`` of the draft KV; "" for ``whole``.

        Returns:
            Whether it is readable now.

        Raises:
            StoreError: tensor: one does not match ``layout``.
            InvariantError: Other parts than these, or ``whole`` with a compressor.
        """
        if parts.keys() not in FORMS or ("whole" in parts) == bool(compressor):
            raise InvariantError(
                f"parts {sorted(parts)} compressed by {compressor!r} of segment {name}"
            )
        if self._leading([name], compressor):
            return True
        began = time.perf_counter()
        objects: dict[Part, Stored] = {}
        manifest = self._described(name, parts, compressor, objects)
        for part, tensors in parts.items():
            stored = self._write(part, tensors, manifest)
            if stored is not None:
                objects[part] = stored
        if len(objects) < len(parts) or not self._manifests.announce(manifest):
            self.counters.add(dropped_writes=1)
            return False
        nbytes = sum(stored.nbytes for stored in objects.values())
        self.pace.note("write", nbytes, time.perf_counter() - began)
        return True

    def put_later(
        self, name: str, parts: Mapping[Part, Tensors], compressor: str = ""
    ) -> Future[bool] | None:
        """Queue a ``put`` in the writer's thread; ``parts`` must not change until then.

        Returns:
            Future result of ``put``, False if it raises. None if the queue is full or
            closed: the segment is dropped.
        """
        try:
            if len(self._writes) >= self._most_waiting:
                raise RuntimeError("too many segments wait")
            future = self._writer.submit(self._put_or_warn, name, parts, compressor)
        except RuntimeError as error:  # also of an executor that was shut down
            self.counters.add(dropped_writes=1)
            self.counters.warn("a segment is not stored", error)
            return None
        self._writes.add(future)
        future.add_done_callback(self._writes.discard)
        return future

    @property
    def waiting(self) -> int:
        """Segments that wait to be written or are being written."""
        return len(self._writes)

    # -- reading ----------------------------------------------------------------

    def lookup(self, names: Sequence[str]) -> int:
        """Count the leading segments that can be restored.

        Args:
            names: Names of a prompt's segments, see ``segment_names``.

        Returns:
            Number of leading segments stored as full KV, or as draft KV and residual KV
            of any compressor.
        """
        return self._leading(names)

    def lookup_compressed(self, names: Sequence[str], compressor: str) -> int:
        """Count the leading segments whose draft KV by ``compressor`` is stored."""
        return self._leading(names, compressor, "draft")

    def restore(
        self, name: str, compressors: Sequence[str] = (), only: Part | None = None
    ) -> Found | None:
        """Read a segment and verify its checksums.

        Args:
            name: The segment's name.
            compressors: Preferred compressors, in this order; then full KV is tried,
                then other compressors.
            only: Read this part alone, by the first of ``compressors`` that has it.

        Returns:
            The segment; None on a miss.
        """
        began = time.perf_counter()
        ranks = {each: at for at, each in enumerate(compressors)}
        last = len(ranks)
        for manifest in sorted(
            filter(self._readable, self._manifests.read([name])[0]),
            key=lambda m: ranks.get(m.compressor, last + bool(m.compressor)),
        ):
            if only is not None and manifest.compressor not in ranks:
                break
            objects = self._read(manifest, only, {})
            if objects:
                nbytes = sum(data.numel() for data, _ in objects.values())
                self.counters.add(hits=len(objects), read_bytes=nbytes)
                self.pace.note("read", nbytes, time.perf_counter() - began)
                return Found(manifest, {part: ts for part, (_, ts) in objects.items()})
        self.counters.add(misses=1)
        return None

    def prefetch(
        self,
        names: Sequence[str],
        compressors: Sequence[str] = (),
        only: Part | None = None,
    ) -> StoreFetch:
        """Restore segments in the reader's thread, up to the first missing one.

        Args:
            names: Names of the segments.
            compressors: See ``restore``.
            only: See ``restore``.

        Returns:
            The read; already done and empty if too many are pending or the store is
            closed.
        """
        prefetch = StoreFetch(names)
        if len(self._reads) < self._most_waiting:
            try:
                future = self._reader.submit(
                    self._prefetch, prefetch, compressors, only
                )
            except RuntimeError:  # closed
                return prefetch
            prefetch.future = future
            self._reads.add(future)
            future.add_done_callback(self._reads.discard)
        return prefetch

    def follow_up(self, drafts: Sequence[Found]) -> StoreFetch:
        """Read the residual KV of segments, one at a time behind every ``prefetch``.

        Args:
            drafts: Segments of which the draft KV alone was read.

        Returns:
            The read, up to the first segment whose residual KV is missing; its segments
            have this part alone.
        """
        rest = StoreFetch([each.manifest.name for each in drafts], future=Future())
        # Only codes are looked at again, with the residual KV.
        kept = [
            each if each.manifest.coded else replace(each, parts={}) for each in drafts
        ]
        self._later(rest, kept)
        return rest

    def refuse(self, found: Found) -> None:
        """Count an unusable segment as damaged, and stop reading it."""
        self.counters.add(damaged=1)
        for key in found.manifest.keys().values():
            self._unusable[key] = None

    # -- upgrades and copies ----------------------------------------------------

    def compress(self, names: Sequence[str], split: Compress, compressor: str) -> int:
        """Upgrade stored segments to the draft KV and residual KV of a compressor.

        Until both parts are stored, readers see the previous form.

        Args:
            names: Segments; those that are not stored are skipped.
            split: Returns (draft, residual) of a stored segment; its exceptions
                propagate.
            compressor: ``compressor_identity`` of the parts that ``split`` returns.

        Returns:
            Number of segments stored in both parts now.
        """
        done = 0
        for name in names:
            if self._leading([name], compressor):
                done += 1
                continue
            found = self.restore(name)
            if found is not None:
                draft, residual = split(found)
                parts: dict[Part, Tensors] = {"draft": draft, "residual": residual}
                done += self.put(name, parts, compressor)
        return done

    def move(
        self,
        name: str,
        target: SegmentStore,
        compressor: str = "",
        only: Part | None = None,
    ) -> bool:
        """Copy one form of a segment unchanged to another store, through this machine.

        This store keeps its copy, as HiCache's interface has no delete. The two parts
        may be copied by separate calls.

        Args:
            name: The segment's name.
            compressor: ``compressor_identity``; "" for ``whole``.
            only: Copy this part alone.

        Returns:
            Whether the target has it now.

        Raises:
            InvariantError: The stores are of different models, ranks or keys.
        """
        if self.fingerprint != target.fingerprint:
            raise InvariantError(f"{self.fingerprint} is not {target.fingerprint}")
        for manifest in self._manifests.read([name])[0]:
            if manifest.compressor != compressor:
                continue
            keys, objects = manifest.keys(), self._read(manifest, only, {})
            if objects and all(
                target._place(keys[part], data, part)
                for part, (data, _) in objects.items()
            ):
                return target._manifests.announce(manifest)
        return False

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for all queued writes; False on a time-out."""
        return not wait(set(self._writes), timeout_s).not_done

    def close(self, timeout_s: float = 10.0) -> bool:
        """Complete queued writes and refuse further ones; False on a time-out."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False)
        drained = self.drain(timeout_s)
        self._writer.shutdown(wait=False, cancel_futures=True)
        return drained

    # -- objects ----------------------------------------------------------------

    def _leading(
        self,
        names: Sequence[str],
        compressor: str | None = None,
        only: Part | None = None,
    ) -> int:
        """Count the leading segments of which a form exists.

        Args:
            names: Segments.
            compressor: ``compressor_identity`` of the form; None: any form.
            only: Part that must exist; None: all parts of the form.
        """
        for start in range(0, len(names), BATCH):
            forms = [
                [
                    set(manifest.keys(only).values())
                    for manifest in manifests
                    if compressor in (None, manifest.compressor)
                    and self._readable(manifest)
                ]
                for manifests in self._manifests.read(names[start : start + BATCH])
            ]
            listed = {key for each in forms for keys in each for key in keys}
            asked = sorted(key for key in listed if key not in self._unusable)
            exist = zip(asked, self._backend.present(asked), strict=True)
            there = {key for key, exists in exist if exists}
            for at, each in enumerate(forms):
                if not any(keys and keys <= there for keys in each):
                    return start + at
        return len(names)

    def _read(
        self, manifest: Manifest, only: Part | None, draft: Mapping[Part, Tensors]
    ) -> Mapping[Part, tuple[torch.Tensor, Tensors]] | None:
        """Read the objects of a manifest, [n] uint8 each, and decode them.

        Args:
            only: Read this part alone.
            draft: What was read of it before: its draft KV, or nothing.

        Returns:
            None if one is missing or damaged; {} if the form has no such part.
        """
        if any(key in self._unusable for key in manifest.keys().values()):
            return None
        keys, objects = manifest.keys(only), {}
        for part, key in keys.items():
            stored, tokens = manifest.objects[part], manifest.tokens
            try:
                fields = self._layout(part, manifest)
                if stored.nbytes > most_bytes(fields):
                    raise StoreError("length", f"{stored.nbytes} bytes")
                data = self._backend.read([key], stored.nbytes)[0]
                if data is None:
                    return None
                if self._digest(data) != stored.digest:
                    raise StoreError("checksum", f"of segment {manifest.name}")
                objects[part] = data, decode(data, fields, tokens)
            except StoreError as error:
                self.counters.note_unreadable(part, error)
                self._unusable[key] = None
                return None
        parts = {**draft, **{part: found for part, (_, found) in objects.items()}}
        if manifest.coded and self.codec is not None and "draft" in parts:
            try:
                self.codec.check(parts["draft"], parts.get("residual"))
            except StoreError as error:
                self.counters.note_unreadable("codes", error)
                self._unusable.update(dict.fromkeys(keys.values()))
                return None
        return objects

    def _readable(self, manifest: Manifest) -> bool:
        """Return whether no other codec than this server's has packed draft KV."""
        coded, codec = manifest.coded, self.codec
        return not coded or (codec is not None and codec.identity == coded.codec)

    def _described(
        self,
        name: str,
        parts: Mapping[Part, Tensors],
        compressor: str,
        objects: Mapping[Part, Stored],
    ) -> Manifest:
        """Return the manifest of parts to be written.

        Raises:
            StoreError: tensor: there are no keys, or codes without a codec.
        """
        model, draft = self.fingerprint.short, parts.get("draft", {})
        if "coded" not in draft:
            counts = {part: _count(tensors) for part, tensors in parts.items()}
            tokens, kept = sum(counts.values()), counts.get("draft", 0)
            return Manifest(model, name, compressor, tokens, kept, objects)
        codec = self.codec
        if codec is None:
            raise StoreError("tensor", f"codes of segment {name}, without a codec")
        kept, coded = draft["coded"].shape[2], coded_of(codec.identity, parts)
        return Manifest(model, name, compressor, codec.tokens, kept, objects, coded)

    def _layout(self, part: Part, manifest: Manifest) -> dict[str, TensorField]:
        """Return the tensors of one part of a form.

        Raises:
            StoreError: header: they cannot be those of a segment.
        """
        tokens, kept = manifest.tokens, manifest.kept
        return layout(self.fingerprint, part, tokens, kept, manifest.coded)

    def _write(self, part: Part, tensors: Tensors, manifest: Manifest) -> Stored | None:
        """Write an object under the digest of its content; None on a failure.

        Raises:
            StoreError: tensor: the tensors would not pass ``decode``.
        """
        fields = self._layout(part, manifest)
        for salt in range(MOST_SALTS):
            data = encode(tensors, salt)
            decode(data, fields, manifest.tokens)
            stored = Stored(data.numel(), self._digest(data))
            key = f"{self.fingerprint.short}.{stored.digest}"
            if self._place(key, data, part):
                return stored
            if key not in self._unusable:
                return None
        return None

    def _place(self, key: str, data: torch.Tensor, part: Part) -> bool:
        """Write an object unless it exists; False if refused or damaged."""
        if key in self._unusable:
            return False
        # An existing object may be corrupt, e.g. of a writer that died before it wrote
        # the manifest, and a write-once backend would not replace it.
        there = self._backend.read([key], data.numel())[0]
        if there is None:
            written = self._backend.write(key, data)
            nbytes = data.numel() * written
            draft = nbytes if part == "draft" else 0
            self.counters.add(written_bytes=nbytes, written_draft_bytes=draft)
            return written
        if not there.equal(data):
            self._unusable[key] = None
        return key not in self._unusable

    def _digest(self, data: torch.Tensor) -> str:
        return self._seal.of(memory_of(data)).hex()

    # -- background -------------------------------------------------------------

    def _put_or_warn(
        self, name: str, parts: Mapping[Part, Tensors], compressor: str
    ) -> bool:
        try:
            return self.put(name, parts, compressor)
        except Exception as error:  # noqa: BLE001 (the future may never be looked at)
            self.counters.add(dropped_writes=1)
            self.counters.warn("a segment cannot be stored", error)
            return False

    def _prefetch(
        self, prefetch: StoreFetch, compressors: Sequence[str], only: Part | None
    ) -> None:
        for name in prefetch.names:
            if prefetch.cancelled:
                return
            found = self.restore(name, compressors, only)
            if found is None:
                return
            prefetch.found.append(found)

    def _later(self, rest: StoreFetch, drafts: Sequence[Found]) -> None:
        """Queue a step of ``follow_up``, or end it if the store is closed."""
        try:
            self._reader.submit(self._follow, rest, drafts)
        except RuntimeError:  # closed
            rest.end()

    def _follow(self, rest: StoreFetch, drafts: Sequence[Found]) -> None:
        """Read the next residual KV, unless other reads wait; those come first."""
        if rest.cancelled:
            rest.end()
            return
        if not self._reads:
            began = time.perf_counter()
            draft = drafts[len(rest.found)]
            manifest = draft.manifest
            objects = self._read(manifest, "residual", draft.parts)
            if not objects:
                self.counters.add(misses=1)
                rest.end()
                return
            ((data, tensors),) = objects.values()
            self.counters.add(hits=1, read_bytes=data.numel())
            self.pace.note("read", data.numel(), time.perf_counter() - began)
            rest.found.append(Found(manifest, {"residual": tensors}))
        if len(rest.found) == len(drafts):
            rest.end()
        else:
            self._later(rest, drafts)


def _count(tensors: Tensors) -> int:
    """Return the number of tokens in a part.

    Raises:
        StoreError: tensor: it has no keys.
    """
    keys = tensors.get("keys")
    if keys is None or keys.dim() != 4:
        raise StoreError("tensor", f"no keys [L, n, H, D] in {sorted(tensors)}")
    return keys.shape[1]
