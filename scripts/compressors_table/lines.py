"""Which compressors the table has, and what is known of them without serving."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.compression.codecs.base import Extent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vericache_sglang.compression.codecs.base import Codec

TABLES = "configs/demo-model/calibration"
PLANES = ((4, 3), (3, 2), (3, 1), (3, 0))

DEFAULT = (
    "snapkv",
    "kvzip",
    "kvzip:plus=true",
    "kvzap:weights=configs/demo-model/kvzap-linear",
    "kvzap:weights=configs/demo-model/kvzap-mlp",
    "expected-attention",
    "observed",
    "keynorm",
    "recency",
    "random",
    "kivi:bits=2",
    "kivi:bits=4",
    f"kvquant:tables={TABLES}/kvquant-2bit.safetensors",
    f"kvquant:tables={TABLES}/kvquant-4bit.safetensors",
    f"rotatekv:tables={TABLES}/rotatekv.safetensors,bits=2",
    f"rotatekv:tables={TABLES}/rotatekv.safetensors,bits=4,clip=1.0",
    "turboquant:bits=2",
    "turboquant:bits=4",
    *(f"split-planes:exponent_bits={e},mantissa_bits={m}" for e, m in PLANES),
    "snapkv+kivi:bits=4",
    "snapkv+split-planes:exponent_bits=3,mantissa_bits=1",
)
"""Lines of ``--vericache-compressor``; paths are relative to the repository."""

SIMULATED = {
    "split-planes:exponent_bits=4,mantissa_bits=3": (15.2, 23.4, 47.7),
    "split-planes:exponent_bits=3,mantissa_bits=2": (15.0, 23.4, 46.8),
    "split-planes:exponent_bits=3,mantissa_bits=1": (15.2, 23.3, 46.7),
    "split-planes:exponent_bits=3,mantissa_bits=0": (14.9, 23.3, 44.7),
    "kivi:bits=2": (12.7, 20.3, 33.8),
}
"""Accepted of 16, 32 and 64 drafts as the project's plan simulated them before there
was a server: teacher-forced, about 4,000 tokens. Its KIVI was KIVI-like."""

SIMULATED_MOST = (15.3, 23.4, 47.7)
"""The same if every draft is right."""

BITS = torch.bfloat16.itemsize * 8
"""Of an element of the KV that calculated sizes are given for."""


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
        """What rows are told apart by."""
        kept = "" if self.keep is None else f", keep {self.keep}"
        return f"{self.compressor}{kept}"

    @property
    def label(self) -> str:
        """The compressor, with files by their stems."""
        return re.sub(r"=[\w./-]*/([\w-]+)(\.safetensors)?", r"=\1", self.compressor)

    @property
    def streams(self) -> bool:
        """Whether the selector watches the queries of the whole prompt."""
        selector = create_compressor(self.compressor, 0).selector
        return selector is not None and selector.needs.q_stream

    def device_bits(self, parts: Mapping[str, int], extent: Extent) -> float:
        """Return the bits per element of a bfloat16 KV that stay on the device.

        Calculated: the demo model is served with float32 KV. Scales and exact tokens
        are included, what rounds codes up to slots is not.

        Args:
            parts: Counts of prompt tokens: offered, kept, coded.
            extent: Of one layer's packed tokens, in bfloat16.
        """
        codec = self._codec()
        bits = codec.draft_bits(extent) if codec else 0.0
        exact = parts["kept"] - parts["coded"]
        return (BITS * exact + bits * parts["coded"]) / parts["offered"]

    def transfer_bfloat16(self, parts: Mapping[str, int], extent: Extent) -> float:
        """Return the share of a bfloat16 KV that a verification would bring back.

        Calculated, without escapes: the demo model is served with float32 KV, whose
        low bits make residuals larger.

        Args:
            parts: Counts of prompt tokens: offered, kept, coded.
            extent: Of one layer's packed tokens, in bfloat16.
        """
        codec = self._codec()
        share = codec.transfer_fraction(extent) if codec else 0.0
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
    found = []
    for text in compressors:
        drops = create_compressor(text, 0).selector is not None
        found += [Line(text, keep) for keep in (keeps if drops else [None])]
    return found


def extent(heads: int, head_dim: int) -> Extent:
    """Return the extent of a segment's packed tokens in bfloat16."""
    return Extent(
        heads=heads,
        tokens=512,
        key_dim=head_dim,
        value_dim=head_dim,
        dtype=torch.bfloat16,
    )
