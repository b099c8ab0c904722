"""Complements in host memory: the part of a prompt's KV that left the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_sglang.memory.host_image import HostImage
from vericache_sglang.memory.splitting import as_bits

if TYPE_CHECKING:
    from vericache_sglang.memory.geometry import KVGeometry


class Complement(HostImage):
    """One request's dropped entries; ``slots`` is m, complement slots.

    Slot j of head h holds the j-th dropped prompt token of that head; heads differ.

    Args:
        geometry: Shapes of the pool.
        slots: m, complement slots.
        kept: n, kept slots.
        dtype: Dtype of the pool.

    Attributes:
        kept: [L, H, n] int32, the prompt positions that stayed, for joining again.
            Covered by the checksums, so written before a layer is sealed.
    """

    noun = "complement"

    def __init__(
        self, geometry: KVGeometry, slots: int, kept: int, dtype: torch.dtype
    ) -> None:
        super().__init__(geometry, slots, dtype)
        self.kept = torch.empty(
            geometry.layers, geometry.kv_heads, kept, dtype=torch.int32
        )

    @property
    def nbytes(self) -> int:
        """See ``HostImage.nbytes``; with the kept positions."""
        return super().nbytes + self.kept.nbytes

    def equals(self, other: Complement) -> bool:
        """Say whether both hold the same bits; reads them only if checksums agree."""
        return (
            self.checksums == other.checksums
            and torch.equal(self.kept, other.kept)
            and torch.equal(as_bits(self.keys), as_bits(other.keys))
            and torch.equal(as_bits(self.values), as_bits(other.values))
        )

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return *super()._parts(layer), self.kept[layer]
