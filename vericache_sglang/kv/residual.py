"""Complements in host memory: the part of a prompt's KV that left the device."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.host_image import HostImage, RawImage, shapes_of
from vericache_sglang.kv.split_layers import as_bits

if TYPE_CHECKING:
    from vericache_sglang.kv.geometry import KVGeometry
    from vericache_sglang.kv.host_image import Blocks, DraftParts
    from vericache_sglang.kv.host_pages import HostPagePool, HostTensor


class HostResidual(HostImage):
    """What brings back the tokens of a prompt that are not exact on the device.

    They are counted per head in ascending position: entry j of head h is the j-th
    token that is not among ``kept[layer, h]``; heads differ. ``slots`` is m, their
    number.
    """

    noun = "complement"

    @property
    def kept(self) -> torch.Tensor:
        """[L, H, n] int32, the prompt positions that stayed exact, for joining again.

        Covered by the checksums, so written before a layer is sealed. A view where its
        pages are neighbours, else a copy.

        Raises:
            InvariantError: It consists of others, which have theirs.
        """
        return self._kept.read()

    @property
    def _kept(self) -> HostTensor:
        raise InvariantError("a complement of several has no positions of its own")

    def describe(self, exact: torch.Tensor, coded: torch.Tensor) -> None:
        """Say which tokens stay; before a layer is written.

        From a GPU the numbers follow on the current stream: whoever seals a layer has
        waited for a copy that was queued behind them.

        Args:
            exact: [L, H, n] int32, positions that stay as they are, ascending.
            coded: [L, H, c] int32, positions a codec packed, ascending.
        """
        self._kept.write(exact)

    def blocks(self, layer: int, drafts: DraftParts | None) -> Blocks:
        """Return one layer's entries, every bit as it was.

        Args:
            layer: Layer index; verified.
            drafts: The draft part, for complements that hold only what it lacks; None:
                it has nothing packed.

        Returns:
            Keys and values of m tokens; not to be modified.
        """
        return self.sides(layer)

    @abstractmethod
    def equals(self, other: HostResidual) -> bool:
        """Say whether both hold the same bits; reads them only if checksums agree."""


class RawResidual(RawImage, HostResidual):
    """The entries themselves.

    Args:
        geometry: Shapes of the pool.
        slots: m, complement slots.
        kept: n, exact tokens.
        dtype: Dtype of the pool.
        pool: Where its memory comes from; None: outside any budget.

    Raises:
        TransferError: The pool has no room; nothing was allocated.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        slots: int,
        kept: int,
        dtype: torch.dtype,
        pool: HostPagePool | None = None,
    ) -> None:
        super().__init__(shapes_of(geometry, slots, dtype, kept), pool)

    @property
    def _kept(self) -> HostTensor:
        return self.tensors["kept"]

    def equals(self, other: HostResidual) -> bool:
        """See ``HostResidual.equals``."""
        if not isinstance(other, RawResidual) or self.checksums != other.checksums:
            return False
        own, others = self.tensors, other.tensors
        if any(own[name].shape != others[name].shape for name in own):
            return False
        return all(
            torch.equal(as_bits(mine), as_bits(theirs))
            for name in own
            for mine, theirs in zip(own[name], others[name], strict=True)
        )
