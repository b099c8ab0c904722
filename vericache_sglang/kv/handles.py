"""Handles of the KV pool, its block table, host memory and transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_kernels.head_entries import pick_entries
from vericache_sglang.kv.split_layers import as_bits

if TYPE_CHECKING:
    import torch

    from vericache_sglang.kv.geometry import KVGeometry
    from vericache_sglang.kv.host_store import HostStore
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.kv.transfers import Transfers


@dataclass(frozen=True, slots=True)
class KVHandles:
    """Bundles the memories of KV, the block table and the transfers.

    Attributes:
        geometry: Shapes of the pool.
        pool: The KV pool with its staging buffer (``k_buffer`` and ``v_buffer`` per
            layer, [slots, H, D]).
        table: Block table ``req_to_token``, [rows, width] int32.
        host: Residual KV and swapped-out requests.
        transfers: Copies between pool and host.
    """

    geometry: KVGeometry
    pool: Any
    table: torch.Tensor
    host: HostStore
    transfers: Transfers

    def row(self, state: RequestState) -> torch.Tensor:
        """Return a request's own block-table row, [width] int32."""
        return self.table[state.req.kv.req_pool_idx]

    @property
    def device(self) -> torch.device:
        """Device of the pool."""
        device: torch.device = self.pool.k_buffer[0].device
        return device

    def pick(
        self, layer: int, slots: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather entries of one layer from the pool, per head, bit-exactly.

        Args:
            layer: Layer index.
            slots: [T] int64, slots of the tokens.
            index: [H, n] int32 or int64, tokens in [0, T).

        Returns:
            Keys [n, H, D] and values [n, H, Dv].
        """
        buffers = self.pool.k_buffer[layer], self.pool.v_buffer[layer]
        keys, values = pick_entries(buffers, index, slots)
        return keys, values

    def put(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write entries of one layer into the pool, bit-exactly.

        Args:
            layer: Layer index.
            slots: [S] int64, unique.
            keys: [S, H, D], on any device.
            values: [S, H, Dv].
        """
        for buffer, entries in (
            (self.pool.k_buffer[layer], keys),
            (self.pool.v_buffer[layer], values),
        ):
            as_bits(buffer)[slots] = as_bits(entries).to(buffer.device)
