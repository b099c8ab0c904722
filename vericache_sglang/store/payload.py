"""A part of a segment in bytes, and back: tensors under a label, never a pickle."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import xxhash

from vericache_sglang.errors import StoreError
from vericache_sglang.memory.splitting import as_bits
from vericache_sglang.store.frame import (
    aligned,
    field,
    memory_of,
    new_frame,
    open_frame,
    seal,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.store.keys import Fingerprint

Part: TypeAlias = Literal["whole", "draft", "rest"]
"""All of a segment's KV; what drafts read; what a verification needs beyond that."""
PARTS: tuple[Part, ...] = ("whole", "draft", "rest")

Tensors: TypeAlias = "Mapping[str, torch.Tensor]"

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16),
        *(torch.float32, torch.float64),
    )
}
MOST_DIMS = 8
MOST_ELEMENTS = 1 << 62
"""Bound of a shape's product, its zeros left out: strides then fit 64 bits."""


@dataclass(frozen=True, slots=True)
class About:
    """What a segment stands for, and how it was packed.

    Attributes:
        tokens: Token ids of the segment.
        parent: Name of the segment before it; of the first one, ``root_name``.
        namespace: See ``root_name``.
        compressor: ``compressor_identity``; empty for a whole segment.
    """

    tokens: tuple[int, ...]
    parent: str
    namespace: tuple[str | None, ...] = ()
    compressor: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """Which object it is.

    Attributes:
        name: The segment's name, see ``segment_names``.
        part: Which part of it.
        pair: Equal for the draft part and the rest that were split from the same KV;
            others must never be joined. Empty for a whole segment.
        about: See ``About``.
    """

    name: str
    part: Part
    pair: str
    about: About


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """An object as it came back.

    Attributes:
        label: Which object it is.
        tensors: By name, as they were put in; views of one buffer.
    """

    label: Label
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class Expect:
    """What an object must be; None: any will do."""

    fingerprint: Fingerprint
    name: str
    part: Part
    compressor: str | None
    pair: str | None = None


def pair_of(parts: Mapping[Part, Tensors]) -> str:
    """Name the split that several parts come from by its content, 32 letters of hex."""
    digest = xxhash.xxh3_128()
    for part, tensors in sorted(parts.items()):
        for name, tensor in sorted(tensors.items()):
            shape = tuple(tensor.shape)
            digest.update(repr((part, name, str(tensor.dtype), shape)).encode())
            digest.update(memory_of(_bytes(tensor)))
    return digest.hexdigest()


def encode(fingerprint: Fingerprint, label: Label, tensors: Tensors) -> torch.Tensor:
    """Write tensors under a label, sealed; equal arguments give equal bytes.

    Args:
        fingerprint: Whose KV.
        label: Which object it is.
        tensors: Of the dtypes in ``DTYPES``, at most 8 dims, on any device.

    Returns:
        [n] uint8 in host memory, see ``Frame``.

    Raises:
        StoreError: tensor: one has another dtype or more dims.
    """
    rows: list[tuple[str, str, list[int], int]] = []
    begin = 0
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.dim() > MOST_DIMS:
            raise StoreError("tensor", f"{name}: a {dtype} of {tensor.dim()} dims")
        rows.append((name, dtype, list(tensor.shape), begin))
        begin = aligned(begin + tensor.nbytes)
    header = {
        "fingerprint": asdict(fingerprint),
        "name": label.name,
        "part": label.part,
        "pair": label.pair,
        "tokens": list(label.about.tokens),
        "parent": label.about.parent,
        "namespace": list(label.about.namespace),
        "compressor": label.about.compressor,
        "tensors": rows,
    }
    frame, body = new_frame(header, begin)
    for name, _, _, offset in rows:
        data = _bytes(tensors[name])
        body[offset : offset + data.numel()].copy_(data)
    seal(frame)
    return frame


def decode(buffer: torch.Tensor, expect: Expect) -> Payload:
    """Read what ``encode`` wrote, if it is what is expected.

    Args:
        buffer: See ``open_frame``; the tensors that come back are views of it.
        expect: What it must be.

    Raises:
        StoreError: It is damaged (length, magic, version, checksum, header, tensor)
            or another object (fingerprint, name, part, compressor, pair).
    """
    frame = open_frame(buffer)
    header = frame.header
    _compare_fingerprints(header, expect.fingerprint)
    for name, wanted in (
        ("name", expect.name),
        ("part", expect.part),
        ("compressor", expect.compressor),
        ("pair", expect.pair),
    ):
        got = field(header, name, str)
        if wanted not in (None, got):
            raise StoreError(name, f"wanted {wanted!r}, got {got!r:.200}")
    about = About(
        tokens=_tokens(header),
        parent=field(header, "parent", str),
        namespace=_namespace(header),
        compressor=field(header, "compressor", str),
    )
    label = Label(expect.name, expect.part, field(header, "pair", str), about)
    tensors = dict(_view(row, frame.body) for row in field(header, "tensors", list))
    return Payload(label, tensors)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in host memory as [n] uint8; copies if it must."""
    bits = as_bits(tensor.detach()).cpu().contiguous()
    return bits.reshape(-1).view(torch.uint8)


def _compare_fingerprints(header: Mapping[str, object], wanted: Fingerprint) -> None:
    got = field(header, "fingerprint", dict)
    ours: dict[str, object] = asdict(wanted)
    differing = {
        name: (ours.get(name), got.get(name))
        for name in sorted(ours.keys() | got.keys())
        if name not in got or name not in ours or got[name] != ours[name]
    }
    if differing:
        raise StoreError("fingerprint", f"(wanted, got) {differing!s:.300}")


def _tokens(header: Mapping[str, object]) -> tuple[int, ...]:
    items = field(header, "tokens", list)
    tokens = tuple(item for item in items if type(item) is int)
    if len(tokens) != len(items):
        raise StoreError("header", "tokens: not all are integers")
    return tokens


def _namespace(header: Mapping[str, object]) -> tuple[str | None, ...]:
    items = field(header, "namespace", list)
    space = tuple(item for item in items if item is None or isinstance(item, str))
    if len(space) != len(items):
        raise StoreError("header", "namespace: wanted strings and nulls")
    return space


def _view(row: object, body: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Cut one tensor out of the body, every number checked before it is used."""
    if not (isinstance(row, list) and len(row) == 4):
        raise StoreError(
            "tensor", f"wanted [name, dtype, shape, offset], got {row!r:.60}"
        )
    name, dtype, shape, offset = row
    if not (isinstance(name, str) and isinstance(dtype, str) and dtype in DTYPES):
        raise StoreError("tensor", f"{name!r:.60} of dtype {dtype!r:.60}")
    elements = _elements(name, shape)
    nbytes = elements * DTYPES[dtype].itemsize
    inside = type(offset) is int and 0 <= offset <= body.numel() - nbytes
    if not inside or aligned(offset) != offset:
        raise StoreError(
            "tensor", f"{name:.60}: {nbytes} bytes at {offset!r:.30} of {body.numel()}"
        )
    view = body[offset : offset + nbytes].view(DTYPES[dtype])
    return name, view.view(shape)


def _elements(name: str, shape: object) -> int:
    if not (isinstance(shape, list) and len(shape) <= MOST_DIMS):
        raise StoreError("tensor", f"{name:.60}: a shape {shape!r:.60}")
    elements = most = 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= MOST_ELEMENTS:
            raise StoreError("tensor", f"{name:.60}: a dim {size!r:.60}")
        elements *= size
        most *= max(1, size)
    if most > MOST_ELEMENTS:
        raise StoreError("tensor", f"{name:.60}: {most!s:.60} elements")
    return elements
