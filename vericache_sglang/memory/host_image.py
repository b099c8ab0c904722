"""KV in host memory: every layer's keys and values, and a checksum of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import xxhash

from vericache_sglang.errors import TransferError
from vericache_sglang.memory.splitting import as_bits

if TYPE_CHECKING:
    from vericache_sglang.memory.geometry import KVGeometry


class HostImage:
    """Entries that left the device. A layer is trusted from its ``seal`` on.

    Shapes: L layers, S slots, H KV heads, D and Dv head dims of keys and values.

    Args:
        geometry: Shapes of the pool the entries come from.
        slots: S.
        dtype: Dtype of the pool.

    Attributes:
        keys: [L, S, H, D] in the pool's dtype, pinned where CUDA is present.
        values: [L, S, H, Dv], as ``keys``.
    """

    noun: ClassVar[str] = "host image"

    def __init__(self, geometry: KVGeometry, slots: int, dtype: torch.dtype) -> None:
        shape = (geometry.layers, slots, geometry.kv_heads)
        pinned = torch.cuda.is_available()
        self.keys = torch.empty(
            *shape, geometry.head_dim, dtype=dtype, pin_memory=pinned
        )
        self.values = torch.empty(
            *shape, geometry.v_head_dim, dtype=dtype, pin_memory=pinned
        )
        self._checksums: list[int | None] = [None] * geometry.layers

    @property
    def layers(self) -> int:
        """L."""
        return self.keys.shape[0]

    @property
    def slots(self) -> int:
        """S."""
        return self.keys.shape[1]

    @property
    def nbytes_layer(self) -> int:
        """Bytes of one layer's keys and values: what crosses the link for it."""
        return (self.keys.nbytes + self.values.nbytes) // self.layers

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def checksums(self) -> tuple[int | None, ...]:
        """xxh3 (64 bits) of each layer, None where it is not sealed."""
        return tuple(self._checksums)

    @property
    def sealed(self) -> bool:
        """Every layer is sealed."""
        return None not in self._checksums

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy one layer in, in the caller's thread, and seal it.

        Args:
            layer: Layer index.
            keys: [S, H, D] on any device.
            values: [S, H, Dv].
        """
        as_bits(self.keys[layer]).copy_(as_bits(keys))
        as_bits(self.values[layer]).copy_(as_bits(values))
        self.seal(layer)

    def seal(self, layer: int) -> None:
        """Checksum one layer after its last write."""
        self._checksums[layer] = self._digest(layer)

    def verify(self, layer: int) -> None:
        """Compare one layer with its checksum.

        Raises:
            TransferError: The bytes changed since ``seal``, or there was none.
        """
        if self._digest(layer) != self._checksums[layer]:
            raise TransferError(f"{self.noun} checksum differs in layer {layer}")

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """What the checksum of a layer covers, in this order."""
        return self.keys[layer], self.values[layer]

    def _digest(self, layer: int) -> int:
        digest = xxhash.xxh3_64()
        for tensor in self._parts(layer):
            digest.update(tensor.view(torch.uint8).numpy().data)
        return digest.intdigest()
