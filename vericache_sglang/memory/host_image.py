"""KV in host memory: what every layer holds there, and a checksum of each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import xxhash

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.arena import Arena, layout
from vericache_sglang.memory.free_spans import rounded
from vericache_sglang.memory.splitting import as_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.memory.arena import Extent
    from vericache_sglang.memory.geometry import KVGeometry


class Entries(Protocol):
    """Entries in one piece of host memory, as a copy finds or leaves them."""

    extent: Extent | None

    @property
    def slots(self) -> int:
        """S."""

    @property
    def keys(self) -> torch.Tensor:
        """[L, S, H, D], pinned where CUDA is present; a view."""

    @property
    def values(self) -> torch.Tensor:
        """[L, S, H, Dv], as ``keys``."""


class HostImage(ABC):
    """Something that left the device. A layer is trusted from its ``seal`` on.

    Args:
        layers: L.

    Attributes:
        extent: Where its tensors are; None: it has no memory of its own. Held for as
            long as the image lives: a copy on its way reads and writes views of it.
    """

    noun: ClassVar[str] = "host image"

    def __init__(self, layers: int) -> None:
        self._checksums: list[int | None] = [None] * layers
        self.extent: Extent | None = None
        self._arena: Arena | None = None
        self._stays = True

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
        """Bytes of all its tensors."""

    @property
    def images(self) -> tuple[Entries, ...]:
        """Where its entries lie, one behind the other; nowhere: it makes them."""
        return ()

    @property
    def held_bytes(self) -> int:
        """Bytes of the arena it takes, alignment and what is not written included."""
        return self.extent.size if self.extent else 0

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

    def settle(self) -> None:
        """Give back what a filled image does not need; default: nothing."""

    def free(self) -> None:
        """Give all its bytes back; a copy that holds the extent keeps them so long.

        Raises:
            InvariantError: That was done before.
        """
        if self.extent and self._arena:
            self._arena.give(self.extent)
            if self._stays:
                self.extent.release()

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

    def _take(self, arena: Arena | None, nbytes: int) -> Extent:
        """Take the image's memory, held.

        Args:
            arena: Where from; None: outside any budget, pinned where CUDA is present.
            nbytes: Of all its tensors, as laid out.

        Raises:
            TransferError: There is no room.
        """
        if arena is None:
            arena = Arena(rounded(nbytes), pinned=torch.cuda.is_available())
        extent = arena.take(nbytes, held=True)
        if extent is None:
            raise TransferError(
                f"{nbytes} bytes exceed the {arena.free_bytes} left of the "
                f"{arena.size} that --vericache-host-gb allows, or every piece of them"
            )
        self._arena, self.extent = arena, extent
        return extent

    def _view(
        self, dtype: torch.dtype, shape: Sequence[int], offset: int
    ) -> torch.Tensor:
        """Return one of its tensors, where it is now.

        Raises:
            InvariantError: It was freed, or has no memory of its own.
        """
        if self.extent is None:
            raise InvariantError(f"a {self.noun} without memory is used")
        return self.extent.view(dtype, shape, offset)

    def _digest(self, layer: int) -> int:
        digest = xxhash.xxh3_64()
        for tensor in self._parts(layer):
            digest.update(tensor.view(torch.uint8).numpy().data)
        return digest.intdigest()


def raw_layout(
    geometry: KVGeometry, slots: int, kept: int = 0
) -> tuple[list[int], int]:
    """Lay entries out, and kept positions behind them.

    Args:
        geometry: Shapes of the pool.
        slots: S.
        kept: n, exact tokens of a complement.

    Returns:
        The first byte of keys, values and positions, and the bytes of all.
    """
    heads = geometry.layers * geometry.kv_heads
    size = heads * slots * geometry.element_bytes
    sizes = (size * geometry.head_dim, size * geometry.v_head_dim)
    return layout((*sizes, heads * kept * torch.int32.itemsize))


class RawImage(HostImage):
    """Entries as they were on the device.

    Shapes: L layers, S slots, H KV heads, D and Dv head dims of keys and values.

    Args:
        geometry: Shapes of the pool the entries come from.
        slots: S.
        dtype: Dtype of the pool.
        arena: Where its memory comes from; None: outside any budget.
        kept: n, positions of every layer and head behind the entries.

    Raises:
        TransferError: The arena has no room; nothing was allocated.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        slots: int,
        dtype: torch.dtype,
        arena: Arena | None = None,
        kept: int = 0,
    ) -> None:
        super().__init__(geometry.layers)
        self._geometry = geometry
        self._slots = slots
        self._dtype = dtype
        self._offsets, nbytes = raw_layout(geometry, slots, kept)
        self._take(arena, nbytes)

    @property
    def slots(self) -> int:
        """S."""
        return self._slots

    @property
    def images(self) -> tuple[Entries, ...]:
        """See ``HostImage.images``."""
        return (self,)

    @property
    def nbytes_layer(self) -> int:
        """See ``HostImage.nbytes_layer``."""
        return self._slots * self._geometry.token_bytes // self.layers

    @property
    def nbytes(self) -> int:
        """See ``HostImage.nbytes``."""
        return self._slots * self._geometry.token_bytes

    @property
    def keys(self) -> torch.Tensor:
        """[L, S, H, D] in the pool's dtype, pinned where CUDA is present; a view."""
        return self._entries(self._geometry.head_dim, self._offsets[0])

    @property
    def values(self) -> torch.Tensor:
        """[L, S, H, Dv], as ``keys``."""
        return self._entries(self._geometry.v_head_dim, self._offsets[1])

    def stay(self, where_it_is: bool) -> None:
        """Say whether its bytes stay where they are, as they do from the start.

        An image no transfer reads or writes may let the arena move it: ``keys`` and
        the like are always right, but good only until the arena's next call.
        """
        if self.extent and where_it_is != self._stays:
            (self.extent.hold if where_it_is else self.extent.release)()
            self._stays = where_it_is

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See ``HostImage.write``; copies."""
        as_bits(self.keys[layer]).copy_(as_bits(keys))
        as_bits(self.values[layer]).copy_(as_bits(values))
        self.seal(layer)

    def _entries(self, dim: int, offset: int) -> torch.Tensor:
        shape = (self.layers, self._slots, self._geometry.kv_heads, dim)
        return self._view(self._dtype, shape, offset)

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.keys[layer], self.values[layer]
