"""RotateKV's calibration file: every layer's order of rotated channels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from vericache_sglang.compression.codecs.artifact import (
    Artifact,
    CalibratedModel,
    check_model,
    read_artifact,
    write_artifact,
)
from vericache_sglang.compression.codecs.hadamard import hadamard
from vericache_sglang.compression.placed import placed
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vericache_sglang.compression.base import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class RotateKVTables:
    """Calibration tables; L layers, C columns (KV heads times head dim).

    Attributes:
        source: File, for messages.
        digest: Digest of the file and of the heads selected from it; equal digests
            mean equal tables.
        rotated_heads: KV heads that were rotated together.
        order: [L, C] int64, indices of the rotated channels in quantization order.
        model: The calibrated model; None: not in the file.
    """

    KIND: ClassVar[str] = "rotatekv-tables"

    source: Path
    digest: str
    rotated_heads: int
    order: torch.Tensor
    model: CalibratedModel | None = None

    def __str__(self) -> str:
        return self.digest

    @staticmethod
    def read(path: Path | str) -> RotateKVTables:
        """Read and check a calibration file.

        Raises:
            CompressionError: The file is missing, truncated, of another kind, or the
                field ``order`` is missing, of a wrong shape or no permutation; the
                message names file and field.
        """
        return _tables_of(read_artifact(path, RotateKVTables.KIND))

    @functools.lru_cache(maxsize=8)  # noqa: B019 (a process has one or two of them)
    def on(self, device: torch.device) -> RotateKVTables:
        """Return the tables on a device; copied once, asynchronously."""
        return replace(self, order=placed(self.order, device))

    def of_heads(self, first: int, heads: int, all_heads: int) -> RotateKVTables:
        """Return the tables of some of the KV heads, see ``Codec.of_heads``.

        Their channels keep their relative order. If the selection splits a group of
        heads that were rotated together, smaller groups are rotated.
        """
        if heads == all_heads:
            return self
        layers, columns = self.order.shape
        dim = columns // all_heads
        start, stop = first * dim, (first + heads) * dim
        own = self.order[(self.order >= start) & (self.order < stop)] - start
        return replace(
            self,
            digest=f"{self.digest}[{first}:{first + heads}]",
            rotated_heads=math.gcd(self.rotated_heads, heads),
            order=own.view(layers, stop - start),
        )

    def check(self, layer: int, columns: int) -> None:
        """Refuse a layer or a width that was not calibrated.

        Raises:
            CompressionError: It was not calibrated; the message names the file.
        """
        layers, width = self.order.shape
        if not 0 <= layer < layers or columns != width:
            raise CompressionError(
                f"{self.source}: field 'order' is for {layers} layers of {width} "
                f"columns; layer {layer} of {columns} is asked for"
            )

    def check_model(self, spec: ModelSpec) -> None:
        """Refuse a model that was not calibrated; see ``artifact.check_model``.

        Raises:
            CompressionError: The models differ; the message names file and difference.
        """
        layers, columns = self.order.shape
        check_model(self.source, (layers, columns), self.model, spec)


def rotate_heads(rows: torch.Tensor, dim: int, together: int) -> torch.Tensor:
    """Walsh-Hadamard transform of groups of heads; its own inverse.

    Args:
        rows: [T, H * D] float.
        dim: D, a power of two.
        together: Heads of a group, a power of two that divides H.

    Returns:
        [T, H * D].

    Raises:
        CompressionError: ``together`` does not divide H, or a group is not a power of
            two.
    """
    width = dim * together
    if rows.shape[1] % width:
        raise CompressionError(
            f"rotatekv: {rows.shape[1] // dim} heads cannot be rotated {together} "
            "at a time"
        )
    return hadamard(rows.reshape(len(rows), -1, width)).reshape(rows.shape)


def calibrate_order(keys: torch.Tensor, dim: int, together: int) -> torch.Tensor:
    """Order the rotated channels of one layer by their sum, smallest first.

    Channels of similar signed sums then share a quantization group, as in the official
    code.

    Args:
        keys: [N, C] float, calibration rows before RoPE, attention sinks left out.
        dim: D.
        together: KV heads rotated together.

    Returns:
        [C] int64, a permutation; of equal sums the lower channel first.
    """
    sums = rotate_heads(keys.to(torch.float64), dim, together).sum(0)
    return sums.sort(stable=True).indices


def write_tables(
    path: Path | str,
    orders: Sequence[torch.Tensor],
    rotated_heads: int,
    model: CalibratedModel | None = None,
    notes: Mapping[str, str] | None = None,
) -> RotateKVTables:
    """Write the orders of a model's layers to one file and read it back.

    Args:
        path: Path of the file.
        orders: Results of ``calibrate_order``.
        rotated_heads: As given to ``calibrate_order``.
        model: The calibrated model; the file is refused for others.
        notes: Further metadata.

    Raises:
        CompressionError: See ``RotateKVTables.read``; or it cannot be written.
    """
    tensors = {"order": torch.stack(list(orders))}
    notes = {**(notes or {}), **(model.notes if model else {})}
    notes["rotated_heads"] = str(rotated_heads)
    return _tables_of(write_artifact(path, RotateKVTables.KIND, tensors, notes))


def _tables_of(artifact: Artifact) -> RotateKVTables:
    """Check the fields.

    Raises:
        CompressionError: See ``RotateKVTables.read``.
    """
    order = artifact.tensor("order", torch.int64, (None, None))
    channels = torch.arange(order.shape[1])
    if not torch.equal(order.sort(dim=1).values, channels.expand_as(order)):
        raise CompressionError(
            f"{artifact.path}: field 'order' is not a permutation in every layer"
        )
    layers, columns = order.shape
    rotated_heads = artifact.count("rotated_heads")
    if columns % rotated_heads:
        raise CompressionError(
            f"{artifact.path}: metadata 'rotated_heads' is {rotated_heads}, which does "
            f"not divide the {columns} columns of field 'order'"
        )
    artifact.check_shape("order", layers, columns)
    made = artifact.model
    return RotateKVTables(artifact.path, artifact.digest, rotated_heads, order, made)
