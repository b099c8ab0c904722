"""Complements of draft parts that lost nothing but their low bits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.budget import complement_indices
from vericache_sglang.compression.codecs.base import Extent as Shape
from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.arena import layout
from vericache_sglang.memory.complement import Complement, DraftParts
from vericache_sglang.memory.free_spans import GRAIN
from vericache_sglang.memory.segments import segment_bounds
from vericache_sglang.memory.splitting import as_bits, pick, put

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.compression.codecs.base import Codec, Part
    from vericache_sglang.memory.arena import Arena
    from vericache_sglang.memory.geometry import KVGeometry


class ResidualComplement(Complement):
    """The residuals of packed tokens, and the entries of dropped ones.

    It cannot be shared: it is joined with one request's draft part, in that request's
    slots.

    Args:
        geometry: Shapes of the pool.
        codec: Whose residuals they are.
        budget: Counts of the prompt.
        dtype: Dtype of the pool.
        arena: Where its memory comes from; None: outside any budget.

    Attributes:
        coded: [L, H, c] int32, prompt positions of the packed tokens; covered by the
            checksums.

    Raises:
        TransferError: The arena has no room for ``most_bytes``; nothing was allocated.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        codec: Codec,
        budget: Budget,
        dtype: torch.dtype,
        arena: Arena | None = None,
    ) -> None:
        super().__init__(geometry.layers)
        heads = (geometry.layers, geometry.kv_heads)
        # Filled from its end on, so that what is left over is its beginning.
        self._left = most_bytes(geometry, codec, budget, dtype)
        self._take(arena, self._left)
        self._kept = self._room(torch.int32, (*heads, budget.exact))
        self.coded = self._room(torch.int32, (*heads, budget.coded))
        self._codec = codec
        self._budget = budget
        self._residuals: dict[int, list[Part]] = {}
        self._dropped: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def slots(self) -> int:
        """See ``HostImage.slots``."""
        return self._budget.staged

    @property
    def kept(self) -> torch.Tensor:
        """See ``Complement.kept``."""
        return self._kept

    @property
    def nbytes_layer(self) -> int:
        """See ``HostImage.nbytes_layer``; the mean over the layers written."""
        return self._held // max(1, len(self._residuals))

    @property
    def nbytes(self) -> int:
        """See ``HostImage.nbytes``; with the positions."""
        return self._held + self.kept.nbytes + self.coded.nbytes

    @property
    def _held(self) -> int:
        residuals = sum(p.nbytes for parts in self._residuals.values() for p in parts)
        dropped = sum(t.nbytes for pair in self._dropped.values() for t in pair)
        return residuals + dropped

    def describe(self, layer: int, exact: torch.Tensor, coded: torch.Tensor) -> None:
        """See ``Complement.describe``."""
        super().describe(layer, exact, coded)
        self.coded[layer].copy_(coded)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See ``HostImage.write``; what is packed is encoded again for its residual."""
        coded, dropped = self._places(layer)
        packed = [pick(entries.cpu(), coded) for entries in (keys, values)]
        residuals = []
        for start, stop in segment_bounds(self._budget.coded):
            _, residual = self._codec.encode(
                packed[0][start:stop].transpose(0, 1),
                packed[1][start:stop].transpose(0, 1),
                layer=layer,
                positions=self.coded[layer, :, start:stop],
            )
            fields = residual.tensors.items()
            own = {field: self._keep(tensor) for field, tensor in fields}
            residuals.append(replace(residual, tensors=own))
        self._residuals[layer] = residuals
        rest = (self._keep(pick(entries.cpu(), dropped)) for entries in (keys, values))
        self._dropped[layer] = next(rest), next(rest)
        self.seal(layer)

    def settle(self) -> None:
        """See ``HostImage.settle``; how well residuals pack is known only now."""
        if self.extent and self._arena:
            self._arena.shrink(self.extent, self.extent.nbytes - self._left)
            self._left = 0

    def entries(
        self, layer: int, drafts: DraftParts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Complement.entries``; joins both planes.

        Raises:
            InvariantError: There are fewer or more draft parts than residuals.
        """
        residuals = self._residuals[layer]
        parts = drafts(layer)
        if len(parts) != len(residuals):
            raise InvariantError(f"{len(parts)} drafts, {len(residuals)} residuals")
        pairs = [
            # Slots hold no extent: how many escapes there are, the residual knows.
            self._codec.join(replace(draft, extent=residual.extent), residual)
            for draft, residual in zip(parts, residuals, strict=True)
        ]
        places = self._places(layer)
        whole = []
        for i in range(2):
            dropped = self._dropped[layer][i]
            entries = dropped.new_empty(self.slots, *dropped.shape[1:])
            put(entries, places[1], dropped)
            if pairs:  # a short prompt may have nothing packed
                packed = torch.cat([pair[i] for pair in pairs], dim=1)
                put(entries, places[0], packed.transpose(0, 1))
            whole.append(entries)
        return whole[0], whole[1]

    def equals(self, other: Complement) -> bool:
        """See ``Complement.equals``: it is never shared."""
        return False

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into the extent; return the copy."""
        own = self._room(tensor.dtype, tensor.shape)
        as_bits(own).copy_(as_bits(tensor))
        return own

    def _room(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return room for a tensor before what the extent holds already.

        Raises:
            InvariantError: The extent is full: a codec's residual is larger than the
                entries it is of, or a layer was written twice.
        """
        self._left -= layout((math.prod(shape) * dtype.itemsize,))[1]
        return self._view(dtype, shape, self._left)

    def _places(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [H, c] and [H, m - c] int64: packed and dropped ones among entries."""
        kept = self.kept[layer].to(torch.int64)
        away = complement_indices(kept, self._budget.offered)
        coded = torch.searchsorted(away, self.coded[layer].to(torch.int64))
        return coded, complement_indices(coded, self._budget.staged)

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        residuals = [
            as_bits(tensor).flatten()
            for part in self._residuals[layer]
            for _, tensor in sorted(part.tensors.items())
        ]
        dropped = (entries.contiguous() for entries in self._dropped[layer])
        return *residuals, *dropped, self.kept[layer], self.coded[layer]


def most_bytes(
    geometry: KVGeometry, codec: Codec, budget: Budget, dtype: torch.dtype
) -> int:
    """Return the most bytes of an extent that a residual complement fills.

    A residual is never larger than the entries it is of; every tensor starts at a
    grain of the arena.

    Args:
        geometry: Shapes of the pool.
        codec: Whose residuals they are.
        budget: Counts of the prompt.
        dtype: Dtype of the pool.
    """
    size = geometry.kv_heads * geometry.element_bytes
    dropped = [
        size * budget.dropped * d for d in (geometry.head_dim, geometry.v_head_dim)
    ]
    residuals = 0
    for start, stop in segment_bounds(budget.coded):
        shape = Shape(
            heads=geometry.kv_heads,
            tokens=stop - start,
            key_dim=geometry.head_dim,
            value_dim=geometry.v_head_dim,
            dtype=dtype,
        )
        fields = len(codec.residual_layout(shape))
        residuals += layout((shape.raw_bytes,))[1] + fields * GRAIN
    layer = layout(dropped)[1] + residuals
    return layout(_position_bytes(geometry, budget))[1] + geometry.layers * layer


def _position_bytes(geometry: KVGeometry, budget: Budget) -> tuple[int, int]:
    """Return the bytes of kept and of packed positions, all layers."""
    size = geometry.layers * geometry.kv_heads * torch.int32.itemsize
    return size * budget.exact, size * budget.coded
