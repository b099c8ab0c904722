"""Complements in host memory: the part of a prompt's KV that left the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xxhash

from vericache_sglang.errors import TransferError

if TYPE_CHECKING:
    from vericache_sglang.memory.geometry import KVGeometry


class Complement:
    """One request's dropped entries, every layer, in host memory.

    Shapes: L layers, m complement slots, H KV heads, D head dim. Slot j of head h holds
    the j-th dropped prompt token of that head; heads differ.

    Attributes:
        keys: [L, m, H, D] in the pool's dtype, pinned where CUDA is present.
        values: [L, m, H, Dv], as ``keys``.
        kept: [L, H, n] int32, the prompt positions that stayed, for joining again.
    """

    def __init__(
        self, geometry: KVGeometry, slots: int, kept: int, dtype: torch.dtype
    ) -> None:
        shape = (geometry.layers, slots, geometry.kv_heads)
        pinned = torch.cuda.is_available()
        self.keys = torch.empty(
            *shape, geometry.head_dim, dtype=dtype, pin_memory=pinned
        )
        self.values = torch.empty(
            *shape, geometry.v_head_dim, dtype=dtype, pin_memory=pinned
        )
        self.kept = torch.empty(
            geometry.layers, geometry.kv_heads, kept, dtype=torch.int32
        )
        self._checksums: list[int] = [0] * geometry.layers

    @property
    def slots(self) -> int:
        """m, complement slots."""
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self.keys.nbytes + self.values.nbytes + self.kept.nbytes

    def seal(self, layer: int) -> None:
        """Checksum one layer after its last write."""
        self._checksums[layer] = self._digest(layer)

    def verify(self, layer: int) -> None:
        """Compare one layer with its checksum.

        Raises:
            TransferError: The bytes changed since ``seal``.
        """
        if self._digest(layer) != self._checksums[layer]:
            raise TransferError(f"complement checksum differs in layer {layer}")

    def _digest(self, layer: int) -> int:
        digest = xxhash.xxh3_64()
        for tensor in (self.keys[layer], self.values[layer]):
            digest.update(tensor.view(torch.uint8).numpy().data)
        return digest.intdigest()


class HostStore:
    """Complements under a fixed budget of host bytes.

    Args:
        geometry: Shapes of the pool the complements come from.
        dtype: Dtype of the pool.
        budget_bytes: Most bytes held at once.
    """

    def __init__(
        self, geometry: KVGeometry, dtype: torch.dtype, budget_bytes: int
    ) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.budget_bytes = budget_bytes
        self._held: dict[str, Complement] = {}

    @property
    def used_bytes(self) -> int:
        """Host bytes held now."""
        return sum(complement.nbytes for complement in self._held.values())

    def fits(self, slots: int) -> bool:
        """Say whether one more complement of ``slots`` slots is within the budget."""
        return self.used_bytes + slots * self.geometry.token_bytes <= self.budget_bytes

    def open(self, rid: str, slots: int, kept: int) -> Complement:
        """Allocate a complement for a request; the caller fills and seals it.

        Args:
            rid: Request id, holding none yet.
            slots: m, complement slots.
            kept: n, kept slots.
        """
        complement = Complement(self.geometry, slots, kept, self.dtype)
        self._held[rid] = complement
        return complement

    def drop(self, rid: str) -> None:
        """Free a request's complement; nothing happens when it has none."""
        self._held.pop(rid, None)
