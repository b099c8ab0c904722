"""TurboQuant's mean-square variant: data-free, per token and head."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from vericache_sglang.compression.about import About
from vericache_sglang.compression.codecs.base import (
    CODECS,
    Codec,
    Layout,
    PartShape,
    PartSpec,
    Source,
    Tensors,
)
from vericache_sglang.compression.codecs.code_book import fit_book, nearest
from vericache_sglang.compression.codecs.packing import pack, packed_bytes, unpack
from vericache_sglang.compression.placed import placed
from vericache_sglang.errors import CompressionError

GRID = 20_001
"""Number of points for integrating the density of a coordinate."""


CPU = torch.device("cpu")


@functools.lru_cache(maxsize=64)
def coordinate_book(dim: int, bits: int, device: torch.device = CPU) -> torch.Tensor:
    """Return the best code book for one coordinate of a random unit vector.

    The coordinate's density is proportional to ``(1 - x**2) ** ((dim - 3) / 2)`` (lemma
    1 of arXiv:2504.19874).

    Args:
        dim: D >= 3.
        bits: Width of a code.
        device: Device of the result; the numbers are the same on every device.

    Returns:
        [2**bits] float32, ascending.
    """
    if device != CPU:
        return placed(coordinate_book(dim, bits), device)
    grid = torch.linspace(-1, 1, GRID, dtype=torch.float64)[1:-1]
    density = (1 - grid**2) ** ((dim - 3) / 2)
    return fit_book(grid, density, 1 << bits, rounds=2000).to(torch.float32)


@functools.lru_cache(maxsize=64)
def random_rotation(dim: int, seed: int, device: torch.device = CPU) -> torch.Tensor:
    """Return a random orthogonal matrix [D, D] float32, the same for equal seeds."""
    if device != CPU:
        return placed(random_rotation(dim, seed), device)
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
    orthogonal, upper = torch.linalg.qr(normal)
    # Fixing the signs of the diagonal makes the distribution uniform (Haar) and the
    # result unique.
    signed: torch.Tensor = orthogonal * upper.diagonal().sign()
    return signed.to(torch.float32)


@CODECS.register("turboquant")
@dataclass(frozen=True)
class TurboQuant(Codec):
    """Norm, random rotation, and the optimal scalar code book of rotated coordinates.

    The variant of least squared error (algorithm 1 of arXiv:2504.19874): needs no
    calibration, no neighbouring tokens and no exact recent tokens. Inner products
    shrink by about the relative squared error, which the paper's second variant
    corrects and this one does not.

    Attributes:
        bits: Width of a code, 1 to 8.
        seed: Seed of the rotation, shared by keys and values.

    Raises:
        CompressionError: ``bits`` is out of its bounds.
    """

    name: ClassVar[str] = "turboquant"
    about: ClassVar[About] = About(
        paper="TurboQuant, arXiv:2504.19874",
        kind="quantize",
        licence="no official code; written from the paper",
    )

    bits: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise CompressionError(f"turboquant: bits must be 1 to 8, got {self.bits}")

    def draft_layout(self, part_shape: PartShape) -> Layout:
        """See ``Codec.draft_layout``; fixed by the shape.

        Raises:
            CompressionError: A head has fewer than 3 dimensions.
        """
        rows = (part_shape.heads, part_shape.tokens)
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for part, dim in (("key", part_shape.key_dim), ("value", part_shape.value_dim)):
            if dim < 3:
                raise CompressionError(f"turboquant: {part} dim {dim} is below 3")
            width = packed_bytes(dim, self.bits)
            layout[f"{part}_codes"] = (torch.uint8, (*rows, width))
            layout[f"{part}_norm"] = (part_shape.dtype, (*rows, 1))
        return layout

    def _encode_draft(self, source: Source) -> tuple[PartShape, Tensors]:
        self.draft_layout(source.part_shape)
        draft: dict[str, torch.Tensor] = {}
        for part, entries in (("key", source.keys), ("value", source.values)):
            rows = entries.to(torch.float32)
            norm = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
            rotation, book = self._tables(rows.shape[2], rows.device)
            # A zero vector divides to NaN; its codes do not matter, its norm is 0.
            codes = nearest(rows / norm @ rotation, book)
            draft[f"{part}_codes"] = pack(codes, self.bits)
            draft[f"{part}_norm"] = norm.to(entries.dtype)
        return source.part_shape, draft

    def _decode(self, draft: PartSpec) -> tuple[torch.Tensor, torch.Tensor]:
        part_shape, tensors, results = draft.part_shape, draft.tensors, []
        for part, dim in (("key", part_shape.key_dim), ("value", part_shape.value_dim)):
            packed = tensors[f"{part}_codes"]
            rotation, book = self._tables(dim, packed.device)
            codes = unpack(packed, self.bits, dim).to(torch.int64)
            rows = book[codes] @ rotation.t() * tensors[f"{part}_norm"]
            results.append(rows.to(part_shape.dtype))
        return results[0], results[1]

    def _tables(
        self, dim: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotation [D, D] and the book, on ``device``."""
        return (
            random_rotation(dim, self.seed, device),
            coordinate_book(dim, self.bits, device),
        )
