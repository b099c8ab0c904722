"""A prompt's compressed KV: draft KV for drafting, residual KV for verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from vericache_sglang.compression.budget import residual_indices
from vericache_sglang.compression.codecs.base import PartSpec, check_kv
from vericache_sglang.compression.codecs.floats import FORMATS
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    KV = Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Keys [H, T, D] and values [H, T, Dv] by layer."""


class Entries(NamedTuple):
    """Keys [H, t, D] and values [H, t, Dv] of one layer."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def elements(self) -> int:
        """Numbers in both."""
        return self.keys.numel() + self.values.numel()


class Residual(NamedTuple):
    """Residual KV of one layer.

    Attributes:
        coded: The codec's residual of the kept tokens; None without a codec.
        dropped: The dropped entries, head by head in the order of their indices.
    """

    coded: PartSpec | None
    dropped: Entries

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return (self.coded.nbytes if self.coded else 0) + self.dropped.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompressedKV:
    """The paper's ``CompressedKV`` (listing 1), with the payload it leaves open.

    Its ``bit_scheme``, one integer, cannot tell group sizes, windows and outliers
    apart: ``identity`` does, and ``bits`` is measured.

    Attributes:
        identity: ``Compressor.identity`` of the compressor that wrote it.
        tokens: T, tokens of the prompt.
        dropped_indices: Per layer, [H, m] int32: the dropped positions, ascending.
        payload: Per layer, the draft KV: the encoded kept tokens, or without a codec
            their entries, sorted by position.
        residual: Per layer, the residual KV, transferred for verification.

    Raises:
        CompressionError: A field is malformed.
    """

    identity: str
    tokens: int
    dropped_indices: tuple[torch.Tensor, ...]
    payload: tuple[PartSpec | Entries, ...]
    residual: tuple[Residual, ...]

    def __post_init__(self) -> None:
        layers = {len(self.dropped_indices), len(self.payload), len(self.residual)}
        if len(layers) != 1 or 0 in layers:
            raise CompressionError(
                f"dropped_indices, payload and residual must be of equally many "
                f"layers, got {len(self.dropped_indices)}, {len(self.payload)} and "
                f"{len(self.residual)}"
            )
        for layer, index in enumerate(self.dropped_indices):
            # One row per head, so that heads drop equally many (scope i).
            if index.dim() != 2 or index.dtype != torch.int32:
                raise CompressionError(
                    f"dropped_indices[{layer}] must be [heads, dropped] int32, got "
                    f"{tuple(index.shape)} {index.dtype}"
                )
            inside = bool(((index >= 0) & (index < self.tokens)).all())
            if not inside or not bool((index.diff(dim=1) > 0).all()):
                raise CompressionError(
                    f"dropped_indices[{layer}] must be ascending and in "
                    f"[0, {self.tokens})"
                )

    @property
    def keep(self) -> float:
        """Share of the tokens that was kept, over all layers and heads."""
        dropped = sum(index.numel() for index in self.dropped_indices)
        rows = sum(index.shape[0] for index in self.dropped_indices)
        return 1 - dropped / (rows * self.tokens)

    @property
    def bits(self) -> float:
        """Bits per element of the kept tokens, every overhead included."""
        elements = sum(
            part.part_shape.elements if isinstance(part, PartSpec) else part.elements
            for part in self.payload
        )
        return 8 * self.draft_bytes / elements

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft KV."""
        return sum(part.nbytes for part in self.payload)

    @property
    def transfer_bytes(self) -> int:
        """Bytes of the residual KV."""
        return sum(residual.nbytes for residual in self.residual)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the full KV."""
        return sum(
            part.part_shape.raw_bytes if isinstance(part, PartSpec) else part.nbytes
            for part in self.payload
        ) + sum(residual.dropped.nbytes for residual in self.residual)

    @property
    def transfer_fraction(self) -> float:
        """Bytes of the residual KV over those of the full KV."""
        return self.transfer_bytes / self.raw_bytes

    def entries(self, layer: int) -> Entries:
        """Return the kept entries of a layer without a codec.

        Raises:
            CompressionError: The layer was encoded.
        """
        payload = self.payload[layer]
        if isinstance(payload, PartSpec):
            raise CompressionError(f"layer {layer} was packed by {payload.codec}")
        return payload

    def parts(self, layer: int) -> tuple[PartSpec, PartSpec]:
        """Return the draft KV and the residual of an encoded layer.

        Raises:
            CompressionError: The layer was not encoded, or one of the two is missing.
        """
        payload, coded = self.payload[layer], self.residual[layer].coded
        if not isinstance(payload, PartSpec) or coded is None:
            raise CompressionError(f"layer {layer} lacks a part of the codec's")
        return payload, coded

    def whole(self, layer: int, kept: Entries) -> Entries:
        """Merge the kept and the dropped entries of a layer by position.

        Args:
            layer: Layer index.
            kept: The kept entries, exact.
        """
        dropped = self.dropped_indices[layer].to(torch.int64)
        index = residual_indices(dropped, self.tokens)
        lost = self.residual[layer].dropped
        return Entries(
            _scattered(((kept.keys, index), (lost.keys, dropped))),
            _scattered(((kept.values, index), (lost.values, dropped))),
        )


def tokens_of(full_kv: KV) -> int:
    """Return T of a prompt's KV.

    Raises:
        CompressionError: There is no layer, one is malformed, or they differ in T.
    """
    counts = {check_kv(keys, values).tokens for keys, values in full_kv}
    if len(counts) != 1:
        raise CompressionError(
            f"full_kv must be layers of equally many tokens, got {sorted(counts)}"
        )
    return counts.pop()


def gathered(entries: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return [H, n, D]: row i of head h is ``entries[h, index[h, i]]``, bit for bit.

    Args:
        entries: [H, T, D] of a dtype of ``FORMATS``.
        index: [H, n] int64.
    """
    wide = index[:, :, None].expand(-1, -1, entries.shape[2])
    # torch's gather may rewrite NaN payloads of bfloat16, so integers are moved.
    bits = entries.view(FORMATS[entries.dtype].integer)
    return bits.gather(1, wide).view(entries.dtype)


def _scattered(pieces: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> torch.Tensor:
    """Scatter entries to their positions, the inverse of ``gathered``.

    Args:
        pieces: (entries [H, n, D], index [H, n] int64); the indices are every position
            once.

    Returns:
        [H, T, D], bit for bit.
    """
    first = pieces[0][0]
    heads, _, dim = first.shape
    integer = FORMATS[first.dtype].integer
    tokens = sum(index.shape[1] for _, index in pieces)
    bits = torch.empty(heads, tokens, dim, dtype=integer, device=first.device)
    for entries, index in pieces:
        wide = index[:, :, None].expand(-1, -1, dim)
        bits.scatter_(1, wide, entries.view(integer))
    return bits.view(first.dtype)
