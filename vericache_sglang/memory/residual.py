"""Complements of draft parts that lost nothing but their low bits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.budget import complement_indices
from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.complement import Complement, DraftParts
from vericache_sglang.memory.segments import segment_bounds
from vericache_sglang.memory.splitting import as_bits, pick, put

if TYPE_CHECKING:
    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.compression.codecs.base import Codec, Part
    from vericache_sglang.memory.geometry import KVGeometry


class ResidualComplement(Complement):
    """The residuals of packed tokens, and the entries of dropped ones.

    It cannot be shared: it is joined with one request's draft part, in that request's
    slots.

    Args:
        geometry: Shapes of the pool.
        codec: Whose residuals they are.
        budget: Counts of the prompt.

    Attributes:
        kept: See ``Complement``.
        coded: [L, H, c] int32, prompt positions of the packed tokens; covered by the
            checksums.
    """

    def __init__(self, geometry: KVGeometry, codec: Codec, budget: Budget) -> None:
        super().__init__(geometry.layers)
        heads = (geometry.layers, geometry.kv_heads)
        self.kept = torch.empty(*heads, budget.exact, dtype=torch.int32)
        self.coded = torch.empty(*heads, budget.coded, dtype=torch.int32)
        self._codec = codec
        self._budget = budget
        self._residuals: dict[int, list[Part]] = {}
        self._dropped: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def slots(self) -> int:
        """See ``HostImage.slots``."""
        return self._budget.staged

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
        self._residuals[layer] = [
            self._codec.encode(
                packed[0][start:stop].transpose(0, 1),
                packed[1][start:stop].transpose(0, 1),
                layer=layer,
                positions=self.coded[layer, :, start:stop],
            )[1]
            for start, stop in segment_bounds(self._budget.coded)
        ]
        self._dropped[layer] = pick(keys.cpu(), dropped), pick(values.cpu(), dropped)
        self.seal(layer)

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
