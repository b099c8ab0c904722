"""Residual KV of prompts in host memory."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.host_image import HostImage, RawImage, shapes_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from vericache_sglang.kv.geometry import KVGeometry
    from vericache_sglang.kv.host_image import Blocks, DraftReader
    from vericache_sglang.kv.host_pages import HostPagePool, HostTensor


class HostResidual(HostImage):
    """Residual KV: restores a prompt's tokens that are not exact on the device.

    Entries are in ascending position per head: entry j of head h is the j-th token
    that is not among ``kept[layer, h]``; heads differ. ``slots`` is m, the number of
    entries per head.
    """

    noun = "residual KV"

    @property
    def kept(self) -> torch.Tensor:
        """[L, H, n] int32, prompt positions kept exactly, for the restore.

        Covered by the checksums, so written before a layer is sealed. A view if its
        pages are contiguous, else a copy.

        Raises:
            InvariantError: It consists of segments, which have their own.
        """
        return self._kept.read()

    @property
    def _kept(self) -> HostTensor:
        raise InvariantError("a residual KV of several has no positions of its own")

    def describe(self, exact: torch.Tensor, coded: torch.Tensor) -> None:
        """Store the positions of kept tokens; call before any layer is written.

        From a GPU the copy is queued on the current stream: sealing a layer waits for a
        copy that is queued behind it.

        Args:
            exact: [L, H, n] int32, positions kept exactly, ascending.
            coded: [L, H, c] int32, positions a codec packed, ascending.
        """
        self._kept.write(exact)

    def fill(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Write and seal every layer; ``describe`` comes before, and ``settle`` behind.

        Args:
            stored: ``keys`` [L, m, H, D] and ``values``.
        """
        pairs = zip(stored["keys"], stored["values"], strict=True)
        for layer, pair in enumerate(pairs):
            self.write(layer, *pair)

    def blocks(self, layer: int, drafts: DraftReader | None) -> Blocks:
        """Return one layer's entries, bit-exact.

        Args:
            layer: Layer index; verified.
            drafts: The draft KV, for residual KV that must be joined with it; None:
                nothing is packed.

        Returns:
            Keys and values of m tokens; not to be modified.
        """
        return self.sides(layer)

    @abstractmethod
    def equals(self, other: HostResidual) -> bool:
        """Return whether both hold the same bits; reads them if checksums agree."""


class RawResidual(RawImage, HostResidual):
    """Residual KV as entries in the dtype of the pool.

    Args:
        geometry: Shapes of the pool.
        slots: m, entries per head.
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
        return self.same_bits(other)
