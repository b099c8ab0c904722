"""Encoding of stored objects: tensors in the safetensors format, fully validated.

The safetensors library is not used, as its functions hold the interpreter lock while
they copy (100 ms for 64 MB), which would stall the scheduler.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

from vericache_sglang.errors import StoreError

if TYPE_CHECKING:
    from vericache_sglang.prefix_cache.store.keys import Fingerprint

Part: TypeAlias = Literal["whole", "draft", "residual"]
"""Full KV, draft KV and residual KV of a segment."""

Tensors: TypeAlias = Mapping[str, torch.Tensor]

DTYPES = {
    "U8": torch.uint8,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
"""Dtypes by their safetensors names."""

LENGTH = struct.Struct("<Q")
"""Length in bytes of the JSON header, which follows; then come the tensors."""
ALIGN = 64
"""The offset in bytes of the tensors is a multiple of this."""
MOST_HEADER_BYTES = 1 << 20


class TensorField(NamedTuple):
    """Dtype and shape of a tensor in an object."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    required: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Coded(NamedTuple):
    """Sizes of a segment whose draft KV a codec has packed.

    Attributes:
        codec: ``codec_identity``.
        slots: KV entries of one layer that take as many bytes as its codes.
        fixed: Bytes of one layer of residual planes without escapes; 0: the residual KV
            is the full KV.
        escapes: Bytes of all escapes.
    """

    codec: str
    slots: int
    fixed: int
    escapes: int


def coded_of(codec: str, parts: Mapping[Part, Tensors]) -> Coded:
    """Return the sizes of packed parts, see ``layout``."""
    slots, planes = parts["draft"]["keys"].shape[1], parts["residual"]
    if "fixed" not in planes:
        return Coded(codec, slots, 0, 0)
    return Coded(codec, slots, planes["fixed"].shape[1], len(planes["escapes"]))


def layout(
    fingerprint: Fingerprint,
    part: Part,
    tokens: int,
    kept: int,
    coded: Coded | None = None,
) -> dict[str, TensorField]:
    """Return the tensors of one part of a segment, by name.

    Args:
        fingerprint: Gives the number of layers and heads, dims and dtype.
        tokens: Tokens of the segment, n.
        kept: Tokens that each head keeps in the draft KV; 0 if ``part`` is "whole".
        coded: Sizes of packed draft KV; None: no codec has packed it.

    Returns:
        ``keys`` and ``values``, [L, tokens of the part, H, dim]; for draft KV also
        ``kept``, int32 [L, H, kept]; optionally the scores of tokens
        (``Selector.update``), ``noted`` float32 [L, H, n], except for residual KV.
        Packed draft KV has ``coded`` in place of ``kept``, and its bytes in as many
        entries as they fill; its residual KV are all tokens, or residual planes: uint8
        ``fixed`` [L, bytes], int32 ``counts`` [L] and uint8 ``escapes`` [bytes].

    Raises:
        StoreError: header: more bytes of residual planes than there can be.
    """
    count = {"whole": tokens, "draft": kept, "residual": tokens - kept}[part]
    where = "kept"
    if coded is not None:
        count, where = coded.slots if part == "draft" else tokens, "coded"
    dtype: torch.dtype = getattr(torch, fingerprint.kv_dtype)
    layers, heads = fingerprint.layers, fingerprint.kv_heads
    if coded is not None and coded.fixed and part == "residual":
        entry = fingerprint.head_dim + fingerprint.v_head_dim
        whole = layers * heads * tokens * entry * dtype.itemsize
        if layers * coded.fixed + coded.escapes > 2 * whole:
            raise StoreError("header", f"planes of {coded} for {whole} bytes of KV")
        return {
            "fixed": TensorField(torch.uint8, (layers, coded.fixed)),
            "counts": TensorField(torch.int32, (layers,)),
            "escapes": TensorField(torch.uint8, (coded.escapes,)),
        }
    fields = {
        "keys": TensorField(dtype, (layers, count, heads, fingerprint.head_dim)),
        "values": TensorField(dtype, (layers, count, heads, fingerprint.v_head_dim)),
    }
    if part == "draft":
        fields[where] = TensorField(torch.int32, (layers, heads, kept))
    if part != "residual":
        fields["noted"] = TensorField(
            torch.float32, (layers, heads, tokens), required=False
        )
    return fields


def most_bytes(fields: Mapping[str, TensorField]) -> int:
    """Return the largest size in bytes of an object with these tensors."""
    header = LENGTH.size + MOST_HEADER_BYTES
    return header + sum(field.nbytes for field in fields.values())


def encode(tensors: Tensors, salt: int = 0) -> torch.Tensor:
    """Write tensors in the safetensors format; equal arguments give equal bytes.

    Args:
        tensors: Of dtypes in ``DTYPES``, on any device.
        salt: Changes the bytes, and so the key, of an object with the same tensors.

    Returns:
        [n] uint8 in host memory.

    Raises:
        StoreError: tensor: a dtype is not in ``DTYPES``.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"salt": str(salt)}} if salt else {}
    end = 0
    # Tensors with larger elements first, so that all are aligned without gaps.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in names:
            raise StoreError("tensor", f"{name}: dtype {tensor.dtype} is not stored")
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-(LENGTH.size + len(text)) % ALIGN)
    body = LENGTH.size + len(text)
    data = torch.empty(body + end, dtype=torch.uint8)
    LENGTH.pack_into(memory_of(data), 0, len(text))
    memory_of(data)[LENGTH.size : body] = text
    for name in order:
        raw = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        data[body : body + raw.numel()].copy_(raw)
        body += raw.numel()
    return data


def decode(
    data: torch.Tensor, fields: Mapping[str, TensorField], tokens: int
) -> dict[str, torch.Tensor]:
    """Read an object that must hold these tensors and no others.

    The object is not trusted: dtypes and shapes must be the expected ones, the tensors
    must be within it, keys and values must be finite, as non-finite logits make
    sampling end the process, and kept positions must be tokens of the segment. Codes
    are any bytes: only their codec can tell what they are.

    Args:
        data: [n] uint8 in host memory, contiguous, of any content.
        fields: See ``layout``.
        tokens: Tokens of the segment.

    Returns:
        Views of ``data``.

    Raises:
        StoreError: header or tensor.
    """
    memory = memory_of(data)
    begin = LENGTH.size + (LENGTH.unpack_from(memory)[0] if len(memory) >= 8 else 0)
    if not LENGTH.size < begin <= min(len(memory), LENGTH.size + MOST_HEADER_BYTES):
        raise StoreError("header", f"of {begin - LENGTH.size} bytes in {len(memory)}")
    header = parse_object(bytes(memory[LENGTH.size : begin]))
    header.pop("__metadata__", None)
    required = {name for name, field in fields.items() if field.required}
    if not required <= header.keys() <= fields.keys():
        raise StoreError(
            "tensor", f"wanted {sorted(fields)}, got {sorted(header)!a:.200}"
        )
    body = data[begin:]
    tensors = {
        name: _view(name, row, fields[name], body) for name, row in header.items()
    }
    for name in ("keys", "values"):
        if name in tensors and "coded" not in tensors:
            _check_finite(name, tensors[name])
    for name in ("kept", "coded"):
        if name in tensors:
            _check_positions(name, tensors[name], tokens)
    return tensors


def parse_object(text: bytes) -> dict[str, object]:
    """Parse a JSON object.

    Raises:
        StoreError: header: the text is not a JSON object.
    """
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError("header", f"is not JSON: {error!s:.100}") from error
    if not isinstance(header, dict):
        raise StoreError("header", f"wanted an object, got {type(header).__name__}")
    return header


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a [n] uint8 tensor in host memory, without copying."""
    return tensor.numpy().data


def _view(
    name: str, row: object, field: TensorField, body: torch.Tensor
) -> torch.Tensor:
    """Return one tensor of an object's body.

    Raises:
        StoreError: tensor: its header entry is not the expected one.
    """
    said = row if isinstance(row, dict) else {}
    dtype, shape = said.get("dtype"), said.get("shape")
    match said.get("data_offsets"):
        case [int(begin), int(end)]:
            inside = 0 <= begin <= end <= body.numel()
        case _:
            begin, end, inside = 0, 0, False
    if (
        not (isinstance(dtype, str) and DTYPES.get(dtype) == field.dtype)
        or shape != list(field.shape)
        or not inside
        or end - begin != field.nbytes
    ):
        raise StoreError(
            "tensor",
            f"{name}: wanted {field.dtype} {list(field.shape)} within {body.numel()} "
            f"bytes, got {row!a:.200}",
        )
    raw = body[begin:end]
    if raw.storage_offset() % field.dtype.itemsize:
        raw = raw.clone()
    return raw.view(field.dtype).view(field.shape)


def _check_finite(name: str, entries: torch.Tensor) -> None:
    """Require that KV entries are finite.

    Raises:
        StoreError: tensor: one of them is not.
    """
    wide = entries.float() if entries.itemsize == 1 else entries
    if wide.numel() and not all(math.isfinite(end) for end in wide.aminmax()):
        raise StoreError("tensor", f"{name}: not every entry is finite")


def _check_positions(name: str, kept: torch.Tensor, tokens: int) -> None:
    """Require that positions [L, H, n] ascend within [0, tokens), head by head.

    Raises:
        StoreError: tensor: they do not.
    """
    ascend = bool((kept[..., 1:] > kept[..., :-1]).all())
    inside = not kept.numel() or (int(kept.min()) >= 0 and int(kept.max()) < tokens)
    if not (ascend and inside):
        raise StoreError(
            "tensor", f"{name}: wanted ascending positions below {tokens} in each head"
        )
