"""A sealed run of bytes: a header that says what it is, a body, a checksum of both."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import xxhash

from vericache_sglang.errors import StoreError
from vericache_sglang.store.keys import FORMAT

if TYPE_CHECKING:
    from collections.abc import Mapping

FieldT = TypeVar("FieldT")

MAGIC = b"VCKV"
PREAMBLE = struct.Struct("<4sHxxIQ")
"""Magic, version, bytes of the header, bytes of the frame; little endian."""
SEAL = 16
"""Bytes of the xxh3_128 at the end."""
ALIGN = 64
"""The body, and every tensor in it, starts at a multiple of this: views need it."""
SMALLEST = PREAMBLE.size + SEAL


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What an intact frame holds.

    Attributes:
        header: The header's object.
        body: [n] uint8, a view of the frame.
        digest: The checksum, 32 letters of hex: names the content.
    """

    header: dict[str, object]
    body: torch.Tensor
    digest: str


def aligned(nbytes: int) -> int:
    """Round bytes up to a multiple of ``ALIGN``."""
    return -(-nbytes // ALIGN) * ALIGN


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a [n] uint8 tensor in host memory, without copying."""
    return tensor.numpy().data


def new_frame(
    header: Mapping[str, object], body_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay out a frame whose body is still zeros; fill the body, then ``seal``.

    Args:
        header: JSON's own types only.
        body_bytes: Bytes of the body.

    Returns:
        The frame [n] uint8 and its body, a view.
    """
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")
    begin = aligned(PREAMBLE.size + len(text))
    total = begin + body_bytes + SEAL
    frame = torch.zeros(total, dtype=torch.uint8)
    memory = memory_of(frame)
    PREAMBLE.pack_into(memory, 0, MAGIC, FORMAT, len(text), total)
    memory[PREAMBLE.size : PREAMBLE.size + len(text)] = text
    return frame, frame[begin : total - SEAL]


def seal(frame: torch.Tensor) -> str:
    """Write the checksum of a filled frame, and return it as hex."""
    memory = memory_of(frame)
    digest = xxhash.xxh3_128(memory[:-SEAL])
    memory[-SEAL:] = digest.digest()
    return digest.hexdigest()


def digest_of(frame: torch.Tensor) -> str:
    """Return the checksum that a sealed frame carries, unchecked, as hex."""
    return memory_of(frame)[-SEAL:].hex()


def open_frame(buffer: torch.Tensor) -> Frame:
    """Check a frame and take it apart, without copying.

    No length found in it is believed before it is compared with the buffer's, and the
    header is parsed only once the checksum is right.

    Args:
        buffer: [n] uint8 in host memory, contiguous, of any content; not modified.

    Raises:
        StoreError: length, magic, version, checksum or header.
    """
    if buffer.storage_offset() % ALIGN:
        buffer = buffer.clone()
    memory = memory_of(buffer)
    if len(memory) < SMALLEST:
        raise StoreError("length", f"wanted {SMALLEST} bytes or more, {len(memory)} is")
    magic, version, text_bytes, total = PREAMBLE.unpack_from(memory)
    if magic != MAGIC:
        raise StoreError("magic", f"wanted {MAGIC!r}, got {magic!r}")
    if version != FORMAT:
        raise StoreError("version", f"wanted {FORMAT}, got {version}")
    begin = aligned(PREAMBLE.size + text_bytes)
    if total != len(memory) or begin + SEAL > total:
        raise StoreError(
            "length",
            f"the frame says {total} bytes, {text_bytes} of them its header, "
            f"and has {len(memory)}",
        )
    digest = xxhash.xxh3_128(memory[:-SEAL])
    if digest.digest() != memory[-SEAL:]:
        raise StoreError(
            "checksum", f"wanted {memory[-SEAL:].hex()}, got {digest.hexdigest()}"
        )
    header = _parse(bytes(memory[PREAMBLE.size : PREAMBLE.size + text_bytes]))
    return Frame(header, buffer[begin : total - SEAL], digest.hexdigest())


def _parse(text: bytes) -> dict[str, object]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError("header", f"is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise StoreError("header", f"wanted an object, got {type(header).__name__}")
    return header


def field(header: Mapping[str, object], name: str, kind: type[FieldT]) -> FieldT:
    """Return a header's field.

    Raises:
        StoreError: It is missing or of another type (bool is no int).
    """
    value = header.get(name)
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    raise StoreError("header", f"{name}: wanted {kind.__name__}, got {value!r:.60}")
