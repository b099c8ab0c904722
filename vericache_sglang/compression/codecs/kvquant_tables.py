"""KVQuant's calibration: thresholds and code books of every layer, as a file."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from vericache_sglang.compression.codecs.artifact import (
    Artifact,
    CalibratedModel,
    check_model,
    read_artifact,
    write_artifact,
)
from vericache_sglang.compression.codecs.code_book import fit_book
from vericache_sglang.compression.codecs.nuq import Scale, inner_range
from vericache_sglang.compression.placed import placed
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vericache_sglang.compression.base import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class KVQuantTables:
    """Calibration tables; L layers, C columns (KV heads times head dim).

    Attributes:
        source: File, for messages.
        digest: Digest of the file and of the heads selected from it; equal digests
            mean equal tables.
        outliers: Share of numbers beyond the thresholds, in [0, 1).
        key_low: [L, C] float32, lower threshold of each key channel before RoPE.
        key_high: [L, C], the upper one.
        key_books: [L, 2**bits] float32, ascending, about [-1, 1].
        value_books: As ``key_books``.
        model: The calibrated model; None: not in the file.
    """

    KIND: ClassVar[str] = "kvquant-tables"

    source: Path
    digest: str
    outliers: float
    key_low: torch.Tensor
    key_high: torch.Tensor
    key_books: torch.Tensor
    value_books: torch.Tensor
    model: CalibratedModel | None = None

    def __str__(self) -> str:
        return self.digest

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.key_books.shape[1].bit_length() - 1

    @property
    def columns(self) -> int:
        """C, elements in a row of keys."""
        return self.key_low.shape[1]

    @staticmethod
    def read(path: Path | str) -> KVQuantTables:
        """Read and check a calibration file.

        Raises:
            CompressionError: The file is missing, truncated, of another kind, or a
                field is missing, of a wrong shape, not finite or out of order; the
                message names file and field.
        """
        return _tables_of(read_artifact(path, KVQuantTables.KIND))

    def of_heads(self, first: int, heads: int, all_heads: int) -> KVQuantTables:
        """Return the tables of some of the KV heads, see ``Codec.of_heads``."""
        if heads == all_heads:
            return self
        dim = self.columns // all_heads
        own = slice(first * dim, (first + heads) * dim)
        return replace(
            self,
            digest=f"{self.digest}[{first}:{first + heads}]",
            key_low=self.key_low[:, own],
            key_high=self.key_high[:, own],
        )

    def check_layer(self, layer: int) -> None:
        """Refuse a layer that was not calibrated.

        Raises:
            CompressionError: The layer is not in the tables; the message names the
                file.
        """
        if not 0 <= layer < len(self.key_low):
            raise CompressionError(
                f"{self.source}: field 'key_low' has {len(self.key_low)} layers, "
                f"layer {layer} is asked for"
            )

    def check_model(self, spec: ModelSpec) -> None:
        """Refuse a model that was not calibrated; see ``artifact.check_model``.

        Raises:
            CompressionError: The models differ; the message names file and difference.
        """
        shape = len(self.key_low), self.columns
        check_model(self.source, shape, self.model, spec)

    @functools.lru_cache(maxsize=8)  # noqa: B019 (a process has one or two of them)
    def on(self, device: torch.device) -> KVQuantTables:
        """Return the tables on a device; copied once, asynchronously."""
        return replace(
            self,
            key_low=placed(self.key_low, device),
            key_high=placed(self.key_high, device),
            key_books=placed(self.key_books, device),
            value_books=placed(self.value_books, device),
        )

    def flat(self) -> torch.Tensor:
        """Return [L, 2 * C + 2 * 2**bits], a layer's offsets, reaches and books."""
        scale = Scale.of(self.key_low, self.key_high)
        return torch.cat([*scale, self.key_books, self.value_books], dim=1)

    def key_scale(self, layer: int) -> Scale:
        """Return the scale [C] of a layer's key channels."""
        return Scale.of(self.key_low[layer], self.key_high[layer])


class LayerTables(NamedTuple):
    """One layer of ``KVQuantTables``."""

    key_low: torch.Tensor
    key_high: torch.Tensor
    key_book: torch.Tensor
    value_book: torch.Tensor


class Samples(NamedTuple):
    """Calibration rows of one layer's keys or values, attention sinks left out.

    Attributes:
        rows: [N, C] float32, finite; keys before RoPE.
        weights: [N, C], importance of each number: the paper's Fisher information is
            the squared gradient of the loss. Ones: plain k-means.
    """

    rows: torch.Tensor
    weights: torch.Tensor


def calibrate_layer(
    keys: Samples, values: Samples, bits: int, outliers: float = 0.01
) -> LayerTables:
    """Find thresholds and books of one layer (sections 3.1 to 3.3 of the paper).

    Args:
        keys: Rows of keys before RoPE.
        values: Rows of values; their number may differ.
        bits: Width of a code, 1 to 8.
        outliers: Share of numbers to leave out, in [0, 1).

    Returns:
        Float32 tables; books are fitted to the normalized numbers without outliers.

    Raises:
        CompressionError: There are no rows, or numbers are not finite.
    """
    share = torch.tensor([outliers / 2, 1 - outliers / 2])
    low, high = _column_percentiles(keys.rows, share)
    outside = (keys.rows < low) | (keys.rows > high)
    books = [_book(keys, Scale.of(low, high), outside, bits)]
    scale, outside, _ = inner_range(values.rows, outliers)
    books.append(_book(values, scale, outside, bits))
    return LayerTables(low, high, books[0], books[1])


def write_tables(
    path: Path | str,
    layers: Sequence[LayerTables],
    outliers: float,
    model: CalibratedModel | None = None,
    notes: Mapping[str, str] | None = None,
) -> KVQuantTables:
    """Write the layers of a model to one file and read it back.

    Args:
        path: Path of the file.
        layers: Results of ``calibrate_layer``.
        outliers: As given to ``calibrate_layer``.
        model: The calibrated model; the file is refused for others.
        notes: Further metadata.

    Raises:
        CompressionError: See ``KVQuantTables.read``; or it cannot be written.
    """
    names = ("key_low", "key_high", "key_books", "value_books")
    stacked = (torch.stack(column) for column in zip(*layers, strict=True))
    tensors = dict(zip(names, stacked, strict=True))
    notes = {**(notes or {}), **(model.notes if model else {})}
    notes["outliers"] = repr(outliers)
    return _tables_of(write_artifact(path, KVQuantTables.KIND, tensors, notes))


def _book(
    samples: Samples, scale: Scale, outside: torch.Tensor, bits: int
) -> torch.Tensor:
    """Fit a book to the numbers inside the thresholds."""
    points, weights = scale.normalized(samples.rows)[~outside], samples.weights
    return fit_book(points, weights[~outside], 1 << bits).to(torch.float32)


def _column_percentiles(rows: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return quantiles [shares, C], per column: torch takes at most 16M numbers."""
    if rows.dim() != 2 or not len(rows):
        raise CompressionError(f"calibration rows must be [N, C], got {rows.shape}")
    found = [torch.quantile(column, shares) for column in rows.unbind(1)]
    return torch.stack(found, dim=1)


def _tables_of(artifact: Artifact) -> KVQuantTables:
    """Check the fields.

    Raises:
        CompressionError: See ``KVQuantTables.read``.
    """
    low = artifact.tensor("key_low", torch.float32, (None, None))
    layers, columns = low.shape
    high = artifact.tensor("key_high", torch.float32, (layers, columns))
    keys = artifact.tensor("key_books", torch.float32, (layers, None))
    values = artifact.tensor("value_books", torch.float32, (layers, keys.shape[1]))
    if keys.shape[1] not in {2**bits for bits in range(1, 9)}:
        raise CompressionError(
            f"{artifact.path}: field 'key_books' must have 2 to 256 entries, a power "
            f"of two, has {keys.shape[1]}"
        )
    if not (low <= high).all():
        raise CompressionError(
            f"{artifact.path}: field 'key_low' is above 'key_high' somewhere"
        )
    outliers = artifact.note("outliers")
    if not 0 <= outliers < 1:
        raise CompressionError(
            f"{artifact.path}: metadata 'outliers' must be in [0, 1), is {outliers}"
        )
    # The order of a book's entries has no meaning; ours are ascending.
    books = keys.sort(dim=1).values, values.sort(dim=1).values
    artifact.check_shape("key_low", layers, columns)
    return KVQuantTables(
        artifact.path, artifact.digest, outliers, low, high, *books, artifact.model
    )
