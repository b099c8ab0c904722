"""Parked requests: all the KV a request still had on the device, in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.kv.host_image import RawImage, shapes_of
from vericache_sglang.kv.split_layers import as_bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from vericache_sglang.kv.geometry import KVGeometry
    from vericache_sglang.kv.host_pages import HostPagePool


class SwappedImage(RawImage):
    """Kept and decode slots of a request that waits without any slot on the device.

    Entry i of a layer is the one of the request's i-th slot, whatever its number was
    and whatever it will be.

    Args:
        geometry: Shapes of the pool the entries come from.
        slots: S.
        dtype: Dtype of the pool.
        pool: Where its memory comes from; None: outside any budget.
    """

    noun = "parked image"

    def __init__(
        self,
        geometry: KVGeometry,
        slots: int,
        dtype: torch.dtype,
        pool: HostPagePool | None = None,
    ) -> None:
        super().__init__(shapes_of(geometry, slots, dtype), pool)


def gathered(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield every layer's keys [S, H, D] and values [S, H, Dv] of ``slots``.

    One layer at a time, and as integers, whose bits no torch operator rewrites.
    """
    for k_buffer, v_buffer in zip(k_buffers, v_buffers, strict=True):
        keys = as_bits(k_buffer).index_select(0, slots)
        values = as_bits(v_buffer).index_select(0, slots)
        yield keys.view(k_buffer.dtype), values.view(v_buffer.dtype)
