"""Calibration files: safetensors that say what they are and are checked when read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load, save_file

from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

FORMAT = "vericache-codec"
"""Value of the metadata key ``format`` in every file of ours."""


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """A calibration file that was read whole.

    Attributes:
        path: Where it was read from, for messages.
        digest: First 12 hex digits of the SHA-256 of its bytes.
        notes: Its metadata.
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
            field: Its name.
            dtype: What it must be.
            shape: What it must be; None: any size.

        Raises:
            CompressionError: It is missing, of another dtype or shape, or not finite;
                the message names the file and the field.
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
            CompressionError: It is missing or no number; the message names both.
        """
        try:
            return float(self.notes[key])
        except (KeyError, ValueError) as error:
            raise CompressionError(
                f"{self.path}: metadata {key!r} must be a number, is "
                f"{self.notes.get(key, 'missing')!r}"
            ) from error


def read_artifact(path: Path | str, kind: str) -> Artifact:
    """Read a calibration file.

    Args:
        path: Of the file.
        kind: What it must be, ``CodecNeeds.artifact``.

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
    """Write a calibration file and read it back.

    Args:
        path: Where; an existing file is replaced once the new one is whole.
        kind: What it is, ``CodecNeeds.artifact``.
        tensors: By field name.
        notes: More metadata, texts.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    metadata = {**notes, "format": FORMAT, "kind": kind}
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial, metadata)
    partial.replace(path)
    return read_artifact(path, kind)
