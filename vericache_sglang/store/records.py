"""What the store has of a segment: small records, each written once, never changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from vericache_sglang.errors import StoreError
from vericache_sglang.store.frame import SMALLEST, field, new_frame, open_frame, seal
from vericache_sglang.store.payload import PARTS, Part

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    import torch

    Held: TypeAlias = dict[tuple[str, str], dict[Part, list["Stored"]]]
    """By (compressor, pair), newest first: each part's objects, newest first."""

RECORD_BYTES = 1024
"""Bytes of a record: fixed, because HiCache's ``get`` wants a target of its size."""
MOST_RECORDS = 16
"""Records of a segment; each put, upgrade or repair adds one."""
MOST_OBJECT_BYTES = 1 << 30
"""Bytes of an object; a record that says more is damaged."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One object of a segment.

    Attributes:
        part: Which part it holds.
        nbytes: Its bytes.
        digest: Its checksum (``Frame.digest``), by which it is named: an object that
            exists has the right content, whoever wrote it.
        salt: 0; more where the object of that name was found damaged, since most
            backends never overwrite.
    """

    part: Part
    nbytes: int
    digest: str
    salt: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """Objects that became readable at once.

    Attributes:
        compressor: ``compressor_key`` of what packed them; empty: whole KV.
        pair: See ``Label.pair``.
        objects: One per part.
    """

    compressor: str
    pair: str
    objects: tuple[Stored, ...]


def record_key(fingerprint: str, name: str, generation: int) -> str:
    """Return the key of a segment's record; generations count from 0 without gaps."""
    return f"{fingerprint}.{name}.record.{generation}"


def object_key(fingerprint: str, name: str, stored: Stored) -> str:
    """Return the key of an object.

    Args:
        fingerprint: ``Fingerprint.short``.
        name: The segment's name.
        stored: The object.
    """
    return f"{fingerprint}.{name}.{stored.part}.{stored.digest}.{stored.salt}"


def encode_record(fingerprint: str, name: str, record: Record) -> torch.Tensor:
    """Write a record, [RECORD_BYTES] uint8; see ``object_key`` for the arguments."""
    header: dict[str, object] = {
        "fingerprint": fingerprint,
        "name": name,
        "compressor": record.compressor,
        "pair": record.pair,
        "objects": [[o.part, o.nbytes, o.digest, o.salt] for o in record.objects],
    }
    smallest, _ = new_frame(header, 0)
    frame, _ = new_frame(header, RECORD_BYTES - smallest.numel())
    seal(frame)
    return frame


def decode_record(buffer: torch.Tensor, fingerprint: str, name: str) -> Record:
    """Read what ``encode_record`` wrote; see ``object_key`` for the other arguments.

    Raises:
        StoreError: It is damaged, or of another model or segment.
    """
    header = open_frame(buffer).header
    for what, wanted in (("fingerprint", fingerprint), ("name", name)):
        got = field(header, what, str)
        if got != wanted:
            raise StoreError(what, f"wanted {wanted!r}, got {got!r:.60}")
    return Record(
        compressor=field(header, "compressor", str),
        pair=field(header, "pair", str),
        objects=tuple(_stored(row) for row in field(header, "objects", list)),
    )


def held(records: Sequence[Record]) -> Held:
    """Sort objects by what they may be joined with.

    Args:
        records: Of one segment, newest first.
    """
    found: Held = {}
    for record in records:
        parts = found.setdefault((record.compressor, record.pair), {})
        for stored in record.objects:
            objects = parts.setdefault(stored.part, [])
            if stored not in objects:
                objects.append(stored)
    return found


def _stored(row: object) -> Stored:
    if not (isinstance(row, list) and len(row) == 4):
        raise StoreError(
            "header", f"wanted [part, bytes, digest, salt], got {row!r:.60}"
        )
    part, nbytes, digest, salt = row
    if part not in PARTS or not isinstance(digest, str):
        raise StoreError("header", f"an object {part!r:.60}, {digest!r:.60}")
    for number, low, high in (
        (nbytes, SMALLEST, MOST_OBJECT_BYTES),
        (salt, 0, 1 << 31),
    ):
        if type(number) is not int or not low <= number <= high:
            raise StoreError("header", f"{part}: {number!r:.60} not in [{low}, {high}]")
    return Stored(cast("Part", part), nbytes, digest, salt)
