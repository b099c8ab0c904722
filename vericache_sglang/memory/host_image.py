"""KV in host memory: what every layer holds there, and a checksum of each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
import xxhash

from vericache_sglang.errors import TransferError
from vericache_sglang.memory.splitting import as_bits

if TYPE_CHECKING:
    from vericache_sglang.memory.geometry import KVGeometry


class HostImage(ABC):
    """Something that left the device. A layer is trusted from its ``seal`` on.

    Args:
        layers: L.
    """

    noun: ClassVar[str] = "host image"

    def __init__(self, layers: int) -> None:
        self._checksums: list[int | None] = [None] * layers

    @property
    def layers(self) -> int:
        """L."""
        return len(self._checksums)

    @property
    @abstractmethod
    def slots(self) -> int:
        """Tokens it stands for, a slot each when they are back."""

    @property
    @abstractmethod
    def nbytes_layer(self) -> int:
        """Bytes of one layer: what crosses the link for it."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of host memory held."""

    @property
    def checksums(self) -> tuple[int | None, ...]:
        """xxh3 (64 bits) of each layer, None where it is not sealed."""
        return tuple(self._checksums)

    @property
    def sealed(self) -> bool:
        """Every layer is sealed."""
        return None not in self._checksums

    @abstractmethod
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take one layer in, in the caller's thread, and seal it.

        Args:
            layer: Layer index.
            keys: [slots, H, D] on any device.
            values: [slots, H, Dv].
        """

    def seal(self, layer: int) -> None:
        """Checksum one layer after its last write."""
        self._checksums[layer] = self._digest(layer)

    def verify(self, layer: int) -> None:
        """Compare one layer with its checksum.

        Raises:
            TransferError: The bytes changed since ``seal``, or there was none.
        """
        sealed = self._checksums[layer]
        if sealed is None or self._digest(layer) != sealed:
            raise TransferError(f"{self.noun} checksum differs in layer {layer}")

    @abstractmethod
    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """What the checksum of a layer covers, in this order."""

    def _digest(self, layer: int) -> int:
        digest = xxhash.xxh3_64()
        for tensor in self._parts(layer):
            digest.update(tensor.view(torch.uint8).numpy().data)
        return digest.intdigest()


class RawImage(HostImage):
    """Entries as they were on the device.

    Shapes: L layers, S slots, H KV heads, D and Dv head dims of keys and values.

    Args:
        geometry: Shapes of the pool the entries come from.
        slots: S.
        dtype: Dtype of the pool.

    Attributes:
        keys: [L, S, H, D] in the pool's dtype, pinned where CUDA is present.
        values: [L, S, H, Dv], as ``keys``.
    """

    def __init__(self, geometry: KVGeometry, slots: int, dtype: torch.dtype) -> None:
        super().__init__(geometry.layers)
        shape = (geometry.layers, slots, geometry.kv_heads)
        pinned = torch.cuda.is_available()
        self.keys = torch.empty(
            *shape, geometry.head_dim, dtype=dtype, pin_memory=pinned
        )
        self.values = torch.empty(
            *shape, geometry.v_head_dim, dtype=dtype, pin_memory=pinned
        )

    @property
    def slots(self) -> int:
        """S."""
        return self.keys.shape[1]

    @property
    def nbytes_layer(self) -> int:
        """See ``HostImage.nbytes_layer``."""
        return (self.keys.nbytes + self.values.nbytes) // self.layers

    @property
    def nbytes(self) -> int:
        """See ``HostImage.nbytes``."""
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See ``HostImage.write``; copies."""
        as_bits(self.keys[layer]).copy_(as_bits(keys))
        as_bits(self.values[layer]).copy_(as_bits(values))
        self.seal(layer)

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.keys[layer], self.values[layer]
