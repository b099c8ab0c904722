"""The compressors of the table, and sizes that are calculated without serving."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.compression.codecs.base import PartShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vericache_sglang.compression.codecs.base import Codec

TABLES = "configs/demo-model/calibration"
PLANES = ((4, 3), (3, 2), (3, 1), (3, 0))

DEFAULT = (
    *("snapkv", "kvzip", "kvzip:plus=true"),
    "kvzap:weights=configs/demo-model/kvzap-linear",
    "kvzap:weights=configs/demo-model/kvzap-mlp",
    *("expected-attention", "observed", "keynorm", "recency", "random"),
    *("kivi:bits=2", "kivi:bits=4"),
    f"kvquant:tables={TABLES}/kvquant-2bit.safetensors",
    f"kvquant:tables={TABLES}/kvquant-4bit.safetensors",
    f"rotatekv:tables={TABLES}/rotatekv.safetensors,bits=2",
    f"rotatekv:tables={TABLES}/rotatekv.safetensors,bits=4,clip=1.0",
    *("turboquant:bits=2", "turboquant:bits=4"),
    *(f"split-planes:exponent_bits={e},mantissa_bits={m}" for e, m in PLANES),
    "snapkv+kivi:bits=4",
    "snapkv+split-planes:exponent_bits=3,mantissa_bits=1",
)
"""Lines of ``--vericache-compressor``; paths are relative to the repository."""

BITS = torch.bfloat16.itemsize * 8
"""Bits per element of the KV for which sizes are calculated."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row to measure.

    Attributes:
        compressor: As ``--vericache-compressor`` takes it.
        keep: Share of tokens to keep; None: a codec alone keeps all.
    """

    compressor: str
    keep: float | None

    @property
    def name(self) -> str:
        """Name of the row, unique."""
        kept = "" if self.keep is None else f", keep {self.keep}"
        return f"{self.compressor}{kept}"

    @property
    def label(self) -> str:
        """The compressor's line, with files replaced by their stems."""
        return re.sub(r"=[\w./-]*/([\w-]+)(\.safetensors)?", r"=\1", self.compressor)

    def device_bits(self, parts: Mapping[str, int], part_shape: PartShape) -> float:
        """Return the bits of draft KV per element of a bfloat16 KV.

        Calculated: the demo model is served with float32 KV. Scales and exact tokens
        are included, the rounding of codes up to slots is not.

        Args:
            parts: Counts of prompt tokens: offered, kept, coded.
            part_shape: Shape of one layer's encoded tokens, in bfloat16.
        """
        codec = self._codec()
        bits = codec.draft_bits(part_shape) if codec else 0.0
        exact = parts["kept"] - parts["coded"]
        return (BITS * exact + bits * parts["coded"]) / parts["offered"]

    def transfer_bfloat16(
        self, parts: Mapping[str, int], part_shape: PartShape
    ) -> float:
        """Return the share of a bfloat16 KV that is residual KV.

        Calculated, without escapes: the demo model is served with float32 KV, whose
        low bits make residuals larger.

        Args:
            parts: Counts of prompt tokens: offered, kept, coded.
            part_shape: Shape of one layer's encoded tokens, in bfloat16.
        """
        codec = self._codec()
        share = codec.transfer_fraction(part_shape) if codec else 0.0
        dropped = parts["offered"] - parts["kept"]
        return (dropped + share * parts["coded"]) / parts["offered"]

    def _codec(self) -> Codec | None:
        """Return the codec as the server uses it, which keeps recent tokens itself."""
        codec = create_compressor(self.compressor, 0).codec
        return codec.without_tail() if codec else None


def lines(compressors: Sequence[str], keeps: Sequence[float]) -> list[Line]:
    """Return a line for every kept share of selectors, and one for every codec.

    Raises:
        ConfigError: A compressor is unknown.
    """
    return [
        Line(text, keep)
        for text in compressors
        for keep in (keeps if create_compressor(text, 0).selector else (None,))
    ]


def packed_part_shape(heads: int, head_dim: int) -> PartShape:
    """Return the shape of a segment's encoded tokens in bfloat16."""
    return PartShape(
        heads=heads,
        tokens=512,
        key_dim=head_dim,
        value_dim=head_dim,
        dtype=torch.bfloat16,
    )
