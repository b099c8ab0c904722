"""Complements in host memory: the part of a prompt's KV that left the device."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.host_image import HostImage, RawImage
from vericache_sglang.memory.splitting import as_bits

if TYPE_CHECKING:
    from vericache_sglang.memory.arena import Arena
    from vericache_sglang.memory.geometry import KVGeometry
    from vericache_sglang.memory.host_image import DraftParts


class Complement(HostImage):
    """What brings back the tokens of a prompt that are not exact on the device.

    They are counted per head in ascending position: entry j of head h is the j-th
    token that is not among ``kept[layer, h]``; heads differ. ``slots`` is m, their
    number.
    """

    noun = "complement"

    @property
    def kept(self) -> torch.Tensor:
        """[L, H, n] int32, the prompt positions that stayed exact, for joining again.

        Covered by the checksums, so written before a layer is sealed.

        Raises:
            InvariantError: It consists of others, which have theirs.
        """
        raise InvariantError("a complement of several has no positions of its own")

    def describe(self, exact: torch.Tensor, coded: torch.Tensor) -> None:
        """Say which tokens stay; before a layer is written.

        From a GPU the numbers follow on the current stream: whoever seals a layer has
        waited for a copy that was queued behind them.

        Args:
            exact: [L, H, n] int32, positions that stay as they are, ascending.
            coded: [L, H, c] int32, positions a codec packed, ascending.
        """
        self.kept.copy_(exact, non_blocking=True)

    @abstractmethod
    def entries(
        self, layer: int, drafts: DraftParts | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's entries, every bit as it was.

        Args:
            layer: Layer index; verified.
            drafts: The draft part, for complements that hold only what it lacks; None:
                it has nothing packed.

        Returns:
            Keys [m, H, D] and values [m, H, Dv] on the host; not to be modified.
        """

    def blocks(
        self, layer: int, drafts: DraftParts | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return ``entries`` in pieces, one behind the other, where that saves a copy.

        Args:
            layer: Layer index; verified.
            drafts: As for ``entries``.
        """
        return [self.entries(layer, drafts)]

    @abstractmethod
    def equals(self, other: Complement) -> bool:
        """Say whether both hold the same bits; reads them only if checksums agree."""


class RawComplement(RawImage, Complement):
    """The entries themselves.

    Args:
        geometry: Shapes of the pool.
        slots: m, complement slots.
        kept: n, exact tokens.
        dtype: Dtype of the pool.
        arena: Where its memory comes from; None: outside any budget.

    Raises:
        TransferError: The arena has no room; nothing was allocated.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        slots: int,
        kept: int,
        dtype: torch.dtype,
        arena: Arena | None = None,
    ) -> None:
        super().__init__(geometry, slots, dtype, arena, kept)
        self._kept_shape = (geometry.layers, geometry.kv_heads, kept)

    @property
    def kept(self) -> torch.Tensor:
        """See ``Complement.kept``; a view."""
        return self._view(torch.int32, self._kept_shape, self._offsets[2])

    @property
    def nbytes(self) -> int:
        """See ``HostImage.nbytes``; with the kept positions."""
        return super().nbytes + math.prod(self._kept_shape) * torch.int32.itemsize

    def entries(
        self, layer: int, drafts: DraftParts | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Complement.entries``; views."""
        return self.keys[layer], self.values[layer]

    def equals(self, other: Complement) -> bool:
        """See ``Complement.equals``."""
        return (
            isinstance(other, RawComplement)
            and self.checksums == other.checksums
            and torch.equal(self.kept, other.kept)
            and torch.equal(as_bits(self.keys), as_bits(other.keys))
            and torch.equal(as_bits(self.values), as_bits(other.values))
        )

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return *super()._parts(layer), self.kept[layer]
