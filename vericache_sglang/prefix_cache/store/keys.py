"""Identities of stored KV: fingerprint of the model, segment names, seals."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from vericache_sglang.config.schema import flag
from vericache_sglang.errors import ConfigError
from vericache_sglang.kv.segment_length import SEGMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMAT = 2
"""Version of the stored format; other versions are never read."""
KEY_BYTES = 32
"""Least bytes of a key file."""
NAME_BYTES = 20
"""Bytes of a segment's name: 40 hex digits, 2**80 trials for a collision."""
WHOLE_FILE = 64 << 20
"""Largest weight file in bytes that is hashed completely."""
SAMPLE, STRIDE = 4 << 10, 1 << 20
"""Larger files are sampled, 4 KiB per MiB: 64 MB are read of 16 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Properties that two servers must share to use each other's KV.

    The page size is not among them, as tokens are stored in prompt order.

    Attributes:
        model: Name under which servers share; the same on all of them.
        weights: ``model_digest`` of the folder the weights were loaded from. New
            weights in a running server need a new fingerprint.
        dtype: Dtype the model computes in, such as ``bfloat16``.
        quantization: Quantization of its weights; "" for none.
        kv_dtype: Dtype of the KV pool.
        layers: Number of layers of this rank.
        first_layer: Index of the first of them (pipeline parallelism), >= 0.
        kv_heads: KV heads per layer of this rank.
        head_dim: Dims of a key.
        v_head_dim: Dims of a value.
        tp_rank: Rank, in [0, tp_size).
        tp_size: Number of tensor-parallel ranks.
        key: Result of ``read_key``; b"" if all writers of the store are trusted. With a
            key, names depend on it too, so that guessed prompts cannot be confirmed.
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
    key: bytes = field(default=b"", repr=False)
    version: int = FORMAT

    @property
    def short(self) -> str:
        """Hash of all fields, 16 hex digits."""
        return _canonical(self.fields())[:8].hex()

    def fields(self) -> dict[str, str | int]:
        """Return every field, the key hashed."""
        key = hashlib.blake2b(self.key, person=b"vericache-names").hexdigest()
        return {**asdict(self), "key": key if self.key else ""}


class Seal:
    """A checksum of content, or with a key a message authentication code.

    Args:
        key: Without a key the seal is xxh3 (128 bits), which detects corruption but not
            forgery; with a key it is keyed BLAKE2b (RFC 7693, 256 bits).

    Attributes:
        nbytes: Bytes of a seal.
    """

    def __init__(self, key: bytes = b"") -> None:
        # BLAKE2b takes keys of up to 64 bytes.
        self._key = hashlib.blake2b(key, person=b"vericache-seal").digest()
        self._keyed = bool(key)
        self.nbytes = 32 if key else 16

    def of(self, data: bytes | memoryview) -> bytes:
        """Return the seal of ``data``."""
        if self._keyed:
            return hashlib.blake2b(data, key=self._key, digest_size=32).digest()
        return xxhash.xxh3_128_digest(data)

    def holds(self, data: bytes | memoryview, sealed: bytes) -> bool:
        """Return whether ``sealed`` is the seal of ``data``."""
        return hmac.compare_digest(self.of(data), sealed)


def read_key(file: str, setting: str = "store_key") -> bytes:
    """Read the key that a setting names.

    Args:
        file: A file of at least ``KEY_BYTES`` bytes that only its owner can read.
        setting: For the messages.

    Raises:
        ConfigError: It cannot be read, is too short, or others can read it.
    """
    where = f"{flag(setting)} {file}"
    try:
        with Path(file).open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            key = opened.read()
    except OSError as error:
        raise ConfigError(f"{where}: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"{where}: wanted mode 0600, got 0{mode:03o}: run chmod 600")
    if len(key) < KEY_BYTES:
        raise ConfigError(f"{where}: wanted {KEY_BYTES} bytes or more, got {len(key)}")
    return key


def model_digest(folder: Path) -> str:
    """Hash a model's folder: its configuration, and samples of its weights.

    Two fine-tunes of a model may have files of equal names and sizes, so contents are
    read: files up to ``WHOLE_FILE`` completely, ``SAMPLE`` bytes per ``STRIDE`` of
    larger ones. A change of less than 1 MiB in a large file may go undetected.

    Args:
        folder: Local folder with ``config.json`` and weight files.

    Returns:
        32 hex digits.

    Raises:
        OSError: A file cannot be read; ``config.json`` is missing.
    """
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    patterns = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.index.json")
    files = {file for pattern in patterns for file in folder.glob(pattern)}
    for file in sorted(files, key=lambda file: file.name):
        size = file.stat().st_size
        digest.update(_canonical([file.name, size]))
        with file.open("rb") as weights:
            if size <= WHOLE_FILE:
                digest.update(weights.read())
                continue
            for start in range(0, size, STRIDE):
                weights.seek(start)
                digest.update(weights.read(SAMPLE))
    return digest.hexdigest()


def segment_names(
    fingerprint: Fingerprint,
    namespace: Sequence[str | None],
    tokens: Sequence[int],
    segment: int = SEGMENT,
) -> list[str]:
    """Name the whole segments of a prompt; a name identifies the prefix up to its end.

    A name is BLAKE2b (RFC 7693) over the parent's name and the segment's tokens, so two
    prompts share exactly the names of their common leading segments. The tokens after
    the last whole segment have no name.

    Args:
        fingerprint: Identity of the KV.
        namespace: Values that separate requests with equal tokens, in a fixed order:
            SGLang's ``extra_key``, ``cache_salt``, the LoRA adapter. None and ""
            differ.
        tokens: Token ids of the prompt, each within 64 signed bits.
        segment: Tokens of a segment, >= 1.

    Returns:
        ``len(tokens) // segment`` names of 40 hex digits.

    Raises:
        OverflowError: A token id does not fit 64 bits.
        TypeError: A token id is not an integer.
    """
    ids = array("q", tokens[: len(tokens) // segment * segment])
    data, step = ids.tobytes(), segment * ids.itemsize
    names, parent = [], _canonical([segment, fingerprint.fields(), list(namespace)])
    for start in range(0, len(data), step):
        digest = hashlib.blake2b(parent, digest_size=NAME_BYTES)
        digest.update(data[start : start + step])
        parent = digest.digest()
        names.append(parent.hex())
    return names


def compressor_identity(line: str, keep: float, version: str) -> str:
    """Return the identity of a compressor, so that parts of different ones never mix.

    Args:
        line: The ``--vericache-compressor`` line.
        keep: Fraction of the prompt kept, in (0, 1].
        version: Version of the package that compressed.

    Returns:
        16 hex digits; full KV has the identity "".
    """
    return _canonical([line, keep, version])[:8].hex()


def codec_identity(codec: str) -> str:
    """Return 16 hex digits for ``Codec.identity``."""
    return _canonical(codec)[:8].hex()


def _canonical(value: object) -> bytes:
    """Return a 32-byte hash of a JSON value, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True).encode("ascii")
    return hashlib.blake2b(text, digest_size=32).digest()
