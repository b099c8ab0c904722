"""A cached segment's keys and values in host memory, as a transfer fills them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.memory.host_image import HostImage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from vericache_sglang.memory.arena import Extent
    from vericache_sglang.memory.host_image import Entries


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a pool's entry.

    Attributes:
        name: Of the tensor.
        dtype: Of the tensor.
        shape: Of the tensor.
        offset: Its first byte in the entry's extent.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def of(self, extent: Extent) -> torch.Tensor:
        """Return the tensor; a view."""
        return extent.view(self.dtype, self.shape, self.offset)


class PooledImage(HostImage):
    """An entry's keys and values, for a transfer to fill; sealed as a whole.

    Args:
        extent: The entry's.
        fields: Its tensors, by name.
        seal: Called once all is written; any thread.
    """

    noun = "segment"

    def __init__(
        self,
        extent: Extent,
        fields: Mapping[str, Field],
        seal: Callable[[], None],
    ) -> None:
        super().__init__(fields["keys"].shape[0])
        self.extent = extent
        self._fields = fields
        self._finish = seal
        self._written: set[int] = set()

    @property
    def slots(self) -> int:
        """See ``HostImage.slots``."""
        return self._fields["keys"].shape[1]

    @property
    def keys(self) -> torch.Tensor:
        """See ``Entries.keys``."""
        return self._view(*self._place("keys"))

    @property
    def values(self) -> torch.Tensor:
        """See ``Entries.values``."""
        return self._view(*self._place("values"))

    @property
    def images(self) -> tuple[Entries, ...]:
        """See ``HostImage.images``."""
        return (self,)

    @property
    def nbytes(self) -> int:
        """See ``HostImage.nbytes``; of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def nbytes_layer(self) -> int:
        """See ``HostImage.nbytes_layer``."""
        return self.nbytes // self.layers

    def seal(self, layer: int) -> None:
        """See ``HostImage.seal``; the entry has one checksum, once all is there."""
        self._written.add(layer)
        if len(self._written) == self.layers:
            self._finish()

    def _place(self, name: str) -> tuple[torch.dtype, tuple[int, ...], int]:
        own = self._fields[name]
        return own.dtype, own.shape, own.offset

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.keys[layer], self.values[layer]
