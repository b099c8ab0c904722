"""Parked requests: all the KV a request still had on the device, in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.host_image import RawImage
from vericache_sglang.memory.splitting import as_bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


class ParkedImage(RawImage):
    """Kept and decode slots of a request that waits without any slot on the device.

    Entry i of a layer is the one of the request's i-th slot, whatever its number was
    and whatever it will be.
    """

    noun = "parked image"

    def fill(
        self,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        slots: torch.Tensor,
    ) -> None:
        """Copy every layer in, in the caller's thread, and seal it.

        Args:
            k_buffers: One [slots of the pool, H, D] tensor per layer.
            v_buffers: One [slots of the pool, H, Dv] tensor per layer.
            slots: [S] int64 on the device of the buffers.

        Raises:
            InvariantError: ``slots`` is not [S].
        """
        self.require_places(slots)
        blocks = gathered(k_buffers, v_buffers, slots)
        for layer, (keys, values) in enumerate(blocks):
            self.write(layer, keys, values)

    def restore(
        self,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        slots: torch.Tensor,
    ) -> None:
        """Verify and copy every layer back, in the caller's thread.

        Args:
            k_buffers: As in ``fill``; other entries than ``slots`` stay as they are.
            v_buffers: As ``k_buffers``.
            slots: [S] int64, unique; any slots, not only those of ``fill``.

        Raises:
            InvariantError: ``slots`` is not [S].
            TransferError: A layer's bytes changed; it and later ones are not written.
        """
        self.require_places(slots)
        buffers = zip(k_buffers, v_buffers, strict=True)
        for layer, (k_buffer, v_buffer) in enumerate(buffers):
            self.verify(layer)
            for buffer, source in ((k_buffer, self.keys), (v_buffer, self.values)):
                # Waits for the copy: the caller may free the image when this returns.
                entries = as_bits(source[layer]).to(buffer.device)
                as_bits(buffer).index_copy_(0, slots, entries)

    def require_places(self, slots: torch.Tensor) -> None:
        """Refuse a number of slots other than the image's.

        Raises:
            InvariantError: ``slots`` is not [S].
        """
        if tuple(slots.shape) != (self.slots,):
            raise InvariantError(
                f"{tuple(slots.shape)} slots for a parked image of {self.slots}"
            )


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
