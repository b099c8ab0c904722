"""Swapped-out requests: the KV that was still on the device, in host memory."""

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
    """Draft KV and decode slots of a swapped-out request.

    Entry i of a layer belongs to the i-th slot of the request's row, independent of
    the slot's number in the pool.

    Args:
        geometry: Shapes of the pool the entries come from.
        slots: S.
        dtype: Dtype of the pool.
        pool: Where its memory comes from; None: outside any budget.
    """

    noun = "swapped image"

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

    One layer at a time, gathered as integers: torch may rewrite bits of NaNs.
    """
    for k_buffer, v_buffer in zip(k_buffers, v_buffers, strict=True):
        keys = as_bits(k_buffer).index_select(0, slots)
        values = as_bits(v_buffer).index_select(0, slots)
        yield keys.view(k_buffer.dtype), values.view(v_buffer.dtype)
