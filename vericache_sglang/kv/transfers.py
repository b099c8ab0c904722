"""Opens the transfers of KV between a device and the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.kv.link import Transfer, Transfers
from vericache_sglang.kv.stream_transfers import StreamTransfers
from vericache_sglang.kv.thread_transfers import ThreadTransfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = [
    "GIB",
    "StreamTransfers",
    "ThreadTransfers",
    "Transfer",
    "Transfers",
    "open_transfers",
]

GIB = 1 << 30


def open_transfers(
    key_buffers: Sequence[torch.Tensor],
    value_buffers: Sequence[torch.Tensor],
    link_gbps: float,
    forward_stream: torch.cuda.Stream | None = None,
) -> Transfers:
    """Return the transfers of the device the KV pool is on.

    Args:
        key_buffers: One [slots, H, D] tensor per layer.
        value_buffers: One [slots, H, Dv] tensor per layer.
        link_gbps: Emulated bandwidth in GB/s; ignored on a CUDA device.
        forward_stream: See ``StreamTransfers``.
    """
    if key_buffers[0].device.type == "cuda":
        return StreamTransfers(key_buffers, value_buffers, forward_stream)
    return ThreadTransfers(key_buffers, value_buffers, link_gbps)
