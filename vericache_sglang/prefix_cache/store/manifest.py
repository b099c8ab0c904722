"""Manifests of stored segments: one per form, written last and read first."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from vericache_sglang.errors import StoreError
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.store.keys import Seal
from vericache_sglang.prefix_cache.store.objects import Coded, memory_of, parse_object

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vericache_sglang.prefix_cache.store.backend import Backend
    from vericache_sglang.prefix_cache.store.keys import Fingerprint
    from vericache_sglang.prefix_cache.store.objects import Part

ValueT = TypeVar("ValueT")

MANIFEST_BYTES = 1024
"""Bytes of a manifest, fixed as HiCache's ``get`` needs a target of its size."""
MOST_MANIFESTS = 16
"""Most manifests of a segment; each form, upgrade or repair adds one."""
MOST_UNUSABLE = 65_536
"""Most keys remembered as damaged, the latest ones."""

FORMS: tuple[frozenset[Part], ...] = (
    frozenset(("whole",)),
    frozenset(("draft", "residual")),
)


class Recent(OrderedDict[str, ValueT]):
    """A dict of the last ``most`` (>= 2) names that were set."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, name: str, value: ValueT) -> None:
        super().__setitem__(name, value)
        self.move_to_end(name)
        if len(self) > self._most:
            self.popitem(last=False)


class Stored(NamedTuple):
    """Size of an object, and its seal in hex, from which its key is made.

    An object with this key has this content, whichever process wrote it, or is damaged.
    """

    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One form of a segment.

    Attributes:
        model: ``Fingerprint.short``.
        name: The segment's name.
        compressor: Identity of the compressor; "" for ``whole``.
        tokens: Tokens of the segment, in [1, SEGMENT].
        kept: Tokens that each head keeps in the draft KV, in [0, tokens].
        objects: ``whole``, or ``draft`` and ``residual`` of the same KV; the backend
            may have evicted some of them.
        coded: Sizes of packed draft KV; None: no codec has packed it.
    """

    model: str
    name: str
    compressor: str
    tokens: int
    kept: int
    objects: Mapping[Part, Stored]
    coded: Coded | None = None

    def keys(self, only: Part | None = None) -> dict[Part, str]:
        """Return the keys of its objects by part, or of the part ``only`` alone."""
        return {
            part: f"{self.model}.{stored.digest}"
            for part, stored in self.objects.items()
            if only in (None, part)
        }

    def encode(self, seal: Seal) -> torch.Tensor:
        """Return [MANIFEST_BYTES] uint8: a JSON object, spaces, the seal of both."""
        said = {name: getattr(self, name) for name in self.__slots__}
        if self.coded is None:
            del said["coded"]
        text = json.dumps(said, separators=(",", ":")).encode("ascii")
        text = text.ljust(MANIFEST_BYTES - seal.nbytes)
        return torch.frombuffer(bytearray(text + seal.of(text)), dtype=torch.uint8)


def decode_manifest(data: torch.Tensor, seal: Seal, model: str, name: str) -> Manifest:
    """Decode and verify a manifest, the inverse of ``Manifest.encode``.

    Args:
        data: [MANIFEST_BYTES] uint8 of any content.
        seal: Seal of the store.
        model: ``Fingerprint.short``.
        name: The segment's name.

    Raises:
        StoreError: It is damaged, or of another model or segment.
    """
    memory = memory_of(data)
    text, sealed = bytes(memory[: -seal.nbytes]), bytes(memory[-seal.nbytes :])
    if not seal.holds(text, sealed):
        raise StoreError("checksum", f"the manifest of segment {name}")
    said = parse_object(text)
    if (said.get("model"), said.get("name")) != (model, name):
        got = said.get("name")
        raise StoreError("name", f"wanted {name} of {model}, got {got!a:.60}")
    match said:
        case {
            "tokens": int(tokens),
            "kept": int(kept),
            "compressor": str(compressor),
            "objects": dict(objects),
        } if (
            0 <= kept <= tokens
            and 1 <= tokens <= SEGMENT
            and objects.keys() in FORMS
            and ("whole" in objects) != bool(compressor)
        ):
            stored = {part: _stored(objects[part], seal) for part in sorted(objects)}
            coded = _coded(said["coded"]) if "coded" in said else None
            return Manifest(model, name, compressor, tokens, kept, stored, coded)
    raise StoreError("header", f"a manifest that says {said!a:.300}")


def _coded(row: object) -> Coded:
    match row:
        case [str(codec), int(slots), int(fixed), int(escapes)] if (
            0 < slots <= SEGMENT and fixed >= 0 and escapes >= 0
        ):
            return Coded(codec, slots, fixed, escapes)
    raise StoreError("header", f"wanted the sizes of codes, got {row!a:.100}")


def _stored(row: object, seal: Seal) -> Stored:
    digits = f"[0-9a-f]{{{2 * seal.nbytes}}}"
    match row:
        case [int(nbytes), str(digest)] if nbytes > 0 and re.fullmatch(digits, digest):
            return Stored(nbytes, digest)
    raise StoreError("header", f"wanted [bytes, digest] of an object, got {row!a:.100}")


class Manifests:
    """The manifests of a store: an append-only list per segment. Thread-safe.

    A manifest is written under the first free number and never changed, which
    write-once backends support too, so a reader sees a complete manifest or none.

    Args:
        backend: The storage backend.
        fingerprint: Identity of the KV, with the key of the seals.

    Attributes:
        unusable: Keys of manifests and objects that this process found damaged.
    """

    def __init__(self, backend: Backend, fingerprint: Fingerprint) -> None:
        self.unusable: Recent[None] = Recent(MOST_UNUSABLE)
        self._backend = backend
        self._model = fingerprint.short
        self._seal = Seal(fingerprint.key)

    def read(self, names: Sequence[str]) -> list[list[Manifest]]:
        """Return the manifests of each segment, newest first."""
        found: dict[str, list[Manifest]] = {name: [] for name in names}
        pending = list(found)
        for generation in range(MOST_MANIFESTS):
            keys = {name: self._key(name, generation) for name in pending}
            asked = [name for name in pending if keys[name] not in self.unusable]
            buffers = self._backend.read([keys[n] for n in asked], MANIFEST_BYTES)
            for name, buffer in zip(asked, buffers, strict=True):
                if buffer is None:
                    pending.remove(name)
                    continue
                try:
                    manifest = decode_manifest(buffer, self._seal, self._model, name)
                    found[name].insert(0, manifest)
                except StoreError as error:
                    self._backend.counters.note_unreadable("manifest", error)
                    self.unusable[keys[name]] = None
        return [found[name] for name in names]

    def announce(self, manifest: Manifest) -> bool:
        """Write the manifest of a form of a segment, unless it exists.

        Returns:
            Whether the form is readable now. False if the backend failed, or the
            segment has ``MOST_MANIFESTS`` others.
        """
        data = manifest.encode(self._seal)
        for generation in range(MOST_MANIFESTS):
            key = self._key(manifest.name, generation)
            if key in self.unusable:
                continue
            there = self._backend.read([key], MANIFEST_BYTES)[0]
            if there is None:
                if not self._backend.write(key, data):
                    return False
                # Another writer may have been first, which a write-once backend does
                # not report.
                there = self._backend.read([key], MANIFEST_BYTES)[0]
            if there is not None and there.equal(data):
                return True
        return False

    def _key(self, name: str, generation: int) -> str:
        return f"{self._model}.{name}.manifest.{generation}"
