"""Names in the store: whose KV it is, which tokens it stands for, how it was packed."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from array import array
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from vericache_sglang.memory.segments import SEGMENT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FORMAT = 1
"""Version of everything the store writes; another one is never read."""
NAME_BYTES = 20
"""Bytes of a segment's name: 2**80 tries for a collision, and 40 letters of hex."""
WHOLE_FILE = 64 << 20
"""Weight files up to this many bytes are hashed whole."""
SAMPLE, STRIDE = 4 << 10, 1 << 20
"""Of larger ones, 4 KiB of every MiB: 16 GB of weights cost 64 MB of reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """All that two servers must agree on before one may use the other's KV.

    The page size is not part of it: what is stored are tokens in prompt order.

    Attributes:
        model: Name under which servers share; the same on all of them.
        weights: ``model_digest`` of the folder the weights were loaded from. New
            weights in a running server need a new fingerprint.
        dtype: Dtype the model computes in, as ``bfloat16``.
        quantization: How its weights are quantized; empty: not at all.
        kv_dtype: Dtype of the KV pool.
        layers: Layers of this rank.
        first_layer: Index of the first of them (pipeline parallelism), >= 0.
        kv_heads: KV heads per layer of this rank.
        head_dim: Dims of a key.
        v_head_dim: Dims of a value.
        tp_rank: Rank, in [0, tp_size).
        tp_size: Ranks the heads are shared by.
        version: ``FORMAT``.
    """

    model: str
    weights: str
    dtype: str
    kv_dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    tp_rank: int = 0
    tp_size: int = 1
    first_layer: int = 0
    quantization: str = ""
    version: int = FORMAT

    @property
    def short(self) -> str:
        """16 letters of hex that stand for every field."""
        return hashlib.blake2b(self.canonical(), digest_size=8).hexdigest()

    def canonical(self) -> bytes:
        """Return every field as bytes; equal only for equal fingerprints."""
        return json.dumps(asdict(self), sort_keys=True).encode("ascii")


def model_digest(folder: Path) -> str:
    """Hash a model's folder: its configuration, and its weights by samples.

    Two fine-tunes of one model differ in no file's name or size, so contents are read:
    files up to ``WHOLE_FILE`` whole, of larger ones ``SAMPLE`` bytes of every
    ``STRIDE``. An edit that touches less than a MiB of a large file can be missed.

    Args:
        folder: Local folder with ``config.json`` and weight files.

    Returns:
        32 letters of hex.

    Raises:
        OSError: A file cannot be read; ``config.json`` is missing.
    """
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    patterns = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.index.json")
    files = {file for pattern in patterns for file in folder.glob(pattern)}
    for file in sorted(files, key=lambda file: file.name):
        size = file.stat().st_size
        digest.update(_text(file.name) + struct.pack("<Q", size))
        with file.open("rb") as weights:
            if size <= WHOLE_FILE:
                digest.update(weights.read())
                continue
            for start in range(0, size, STRIDE):
                weights.seek(start)
                digest.update(weights.read(SAMPLE))
    return digest.hexdigest()


def root_name(
    fingerprint: Fingerprint, namespace: Sequence[str | None], segment: int = SEGMENT
) -> str:
    """Name the empty prefix: the parent of a prompt's first segment.

    Args:
        fingerprint: Whose KV.
        namespace: What separates requests with equal tokens, in a fixed order: SGLang's
            ``extra_key``, ``cache_salt``, the LoRA adapter. None and "" differ.
        segment: Tokens of a segment.
    """
    digest = hashlib.blake2b(digest_size=NAME_BYTES, person=b"vericache-root")
    canonical = fingerprint.canonical()
    digest.update(struct.pack("<QQ", segment, len(canonical)) + canonical)
    digest.update(struct.pack("<Q", len(namespace)))
    for item in namespace:
        digest.update(b"\0" if item is None else b"\1" + _text(item))
    return digest.hexdigest()


def segment_names(
    fingerprint: Fingerprint,
    namespace: Sequence[str | None],
    tokens: Sequence[int],
    segment: int = SEGMENT,
) -> list[str]:
    """Name the whole segments of a prompt; a name implies everything before it.

    Each is BLAKE2b (RFC 7693) over its parent's name and its tokens, so two prompts
    share the names of the segments they share from the start, and no other. A tail
    shorter than a segment has no name.

    Args:
        fingerprint: See ``root_name``.
        namespace: See ``root_name``.
        tokens: Token ids of the prompt, each within 64 signed bits.
        segment: Tokens of a segment, >= 1.

    Returns:
        ``len(tokens) // segment`` names of 40 letters of hex.

    Raises:
        OverflowError: A token id does not fit 64 bits.
        TypeError: A token id is not an integer.
    """
    whole = len(tokens) // segment * segment
    ids = array("q", tokens[:whole])
    if sys.byteorder == "big":
        ids.byteswap()
    data, step = ids.tobytes(), segment * ids.itemsize
    names, parent = [], bytes.fromhex(root_name(fingerprint, namespace, segment))
    for start in range(0, len(data), step):
        digest = hashlib.blake2b(
            parent, digest_size=NAME_BYTES, person=b"vericache-next"
        )
        digest.update(data[start : start + step])
        parent = digest.digest()
        names.append(parent.hex())
    return names


def compressor_identity(line: str, keep: float, version: str) -> str:
    """Describe how draft parts were made, so that only equal ones are ever mixed.

    Args:
        line: The ``--vericache-compressor`` line.
        keep: Fraction of the prompt kept, in (0, 1].
        version: Version of the package that packed.
    """
    return json.dumps({"compressor": line, "keep": keep, "version": version})


def compressor_key(identity: str) -> str:
    """Shorten a compressor's identity to 16 letters of hex; "" stays "" (whole KV)."""
    if not identity:
        return ""
    data = identity.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data
