"""Calibration files: safetensors with metadata, validated when read."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load, save

from vericache_sglang.compression.codecs.fingerprint import model_fingerprint
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from vericache_sglang.compression.base import ModelSpec

FORMAT = "vericache-codec"
"""Value of the metadata key ``format`` in every file of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedModel:
    """Identity of a calibrated model.

    Attributes:
        name: Name of its folder, for messages.
        fingerprint: See ``model_fingerprint``.
        layers: L.
        kv_heads: H of the whole model, all ranks together.
        head_dim: D, elements of one key.
    """

    name: str
    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def notes(self) -> dict[str, str]:
        """Return it as metadata."""
        return {
            "model": self.name,
            "model_fingerprint": self.fingerprint,
            "model_layers": str(self.layers),
            "model_kv_heads": str(self.kv_heads),
            "model_head_dim": str(self.head_dim),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """A validated calibration file in memory.

    Attributes:
        path: Where it was read from, for messages.
        digest: First 12 hex digits of the SHA-256 of its bytes.
        tensors: By field name.
    """

    path: Path
    digest: str
    notes: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]

    def tensor(
        self, field: str, dtype: torch.dtype, shape: tuple[int | None, ...]
    ) -> torch.Tensor:
        """Return a field.

        Args:
            dtype: Required dtype.
            shape: Required shape; None: any size.

        Raises:
            CompressionError: The field is missing, of another dtype or shape, or not
                finite; the message names the file and the field.
        """
        where = f"{self.path}: field {field!r}"
        if field not in self.tensors:
            raise CompressionError(
                f"{where} is missing; the file has {sorted(self.tensors)}"
            )
        tensor = self.tensors[field]
        fits = tensor.dim() == len(shape) and all(
            wanted in (None, size)
            for size, wanted in zip(tensor.shape, shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            wanted = ["any" if size is None else size for size in shape]
            raise CompressionError(
                f"{where} must be {dtype} {wanted}, is {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        if not tensor.isfinite().all():
            raise CompressionError(f"{where} holds NaN or infinities")
        return tensor

    def note(self, key: str) -> float:
        """Return a number from the metadata.

        Raises:
            CompressionError: It is missing or no finite number; the message names both.
        """
        text = self.notes.get(key, "missing")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise CompressionError(
                f"{self.path}: metadata {key!r} must be a number, is {text!r}"
            )
        return number

    def count(self, key: str) -> int:
        """Return a whole number >= 1 from the metadata.

        Raises:
            CompressionError: It is missing or something else; the message names both.
        """
        number = self.note(key)
        if number < 1 or number != int(number):
            raise CompressionError(
                f"{self.path}: metadata {key!r} must be >= 1, is {self.notes[key]}"
            )
        return int(number)

    @property
    def model(self) -> CalibratedModel | None:
        """Return the calibrated model; None: the metadata does not name it.

        Raises:
            CompressionError: Part of it is missing; the message names the field.
        """
        if "model_fingerprint" not in self.notes:
            return None
        return CalibratedModel(
            name=self.notes.get("model", "a model without name"),
            fingerprint=self.notes["model_fingerprint"],
            layers=self.count("model_layers"),
            kv_heads=self.count("model_kv_heads"),
            head_dim=self.count("model_head_dim"),
        )

    def check_shape(self, field: str, layers: int, columns: int) -> None:
        """Refuse a field that does not fit the model the metadata names.

        Args:
            field: Name of the field.
            layers: Layers of the field.
            columns: Columns of each layer of the field.

        Raises:
            CompressionError: The shapes differ; the message names file and field.
        """
        made = self.model
        if made is None:
            return
        wanted = made.layers, made.kv_heads * made.head_dim
        if (layers, columns) != wanted:
            raise CompressionError(
                f"{self.path}: field {field!r} has {layers} layers of {columns} "
                f"columns, metadata 'model_layers', 'model_kv_heads' and "
                f"'model_head_dim' make it {wanted[0]} of {wanted[1]}"
            )


def read_artifact(path: Path | str, kind: str) -> Artifact:
    """Read a calibration file.

    Args:
        path: Path of the file.
        kind: Required kind, ``CodecNeeds.artifact``.

    Raises:
        CompressionError: It is missing, truncated, no safetensors file, not ours, or
            of another kind; the message names the file.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        tensors = load(content)
    except OSError as error:
        raise CompressionError(f"{path}: cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise CompressionError(
            f"{path}: truncated or not a safetensors file: {error}"
        ) from error
    # The header: its length in 8 bytes, then JSON; ``load`` just read both.
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    notes = header.get("__metadata__", {})
    if notes.get("format") != FORMAT:
        raise CompressionError(
            f"{path}: not a calibration file: metadata 'format' is "
            f"{notes.get('format', 'missing')!r}, not {FORMAT!r}"
        )
    if notes.get("kind") != kind:
        raise CompressionError(
            f"{path}: metadata 'kind' is {notes.get('kind', 'missing')!r}, not {kind!r}"
        )
    digest = hashlib.sha256(content).hexdigest()[:12]
    return Artifact(path, digest, notes, tensors)


def write_artifact(
    path: Path | str,
    kind: str,
    tensors: Mapping[str, torch.Tensor],
    notes: Mapping[str, str],
) -> Artifact:
    """Write a calibration file and read it back; equal content, equal bytes.

    Args:
        path: Path of the file; an existing file is replaced atomically.
        kind: Kind of the file, ``CodecNeeds.artifact``.
        tensors: Tensors by field name.
        notes: Further metadata, texts.

    Raises:
        CompressionError: It cannot be written; the message names the file.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    metadata = {**notes, "format": FORMAT, "kind": kind}
    whole = save({name: t.contiguous() for name, t in tensors.items()}, metadata)
    try:
        partial.write_bytes(_in_order(whole))
        partial.replace(path)
    except OSError as error:
        raise CompressionError(
            f"{path}: cannot be written: {error.strerror}"
        ) from error
    return read_artifact(path, kind)


def _in_order(content: bytes) -> bytes:
    """Sort the metadata: safetensors writes it in another order every time."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The tensors behind it start at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def check_model(
    source: Path, shape: tuple[int, int], made: CalibratedModel | None, spec: ModelSpec
) -> None:
    """Refuse a calibration of another model.

    Args:
        source: The file, for messages.
        shape: Layers and columns (KV heads times head dim) of its tensors.
        made: The calibrated model; None: only ``shape`` is compared.
        spec: The served model, over all ranks. If its ``name`` is a folder, the weights
            are compared too.

    Raises:
        CompressionError: The models differ; the message names file, field and both
            values.
    """
    layers, columns = shape
    compared = [
        ("layers", layers, spec.layers),
        ("columns", columns, spec.kv_heads * spec.head_dim),
    ]
    if made is not None:
        compared = [
            ("model_layers", made.layers, spec.layers),
            ("model_kv_heads", made.kv_heads, spec.kv_heads),
            ("model_head_dim", made.head_dim, spec.head_dim),
        ]
    served = spec.name or "the model"
    for field, has, wanted in compared:
        if has != wanted:
            raise CompressionError(
                f"{source}: {field!r} is {has}, {served} has {wanted}: the file is of "
                f"another model{f', {made.name}' if made else ''}"
            )
    if made is not None and Path(spec.name, "config.json").is_file():
        found = model_fingerprint(spec.name)
        if made.fingerprint != found:
            raise CompressionError(
                f"{source}: 'model_fingerprint' is {made.fingerprint} (of "
                f"{made.name}), {served} has {found}: the file is of another model"
            )
