"""Tensors of the host on the device that uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, without waiting for it; itself if it is there.

    Args:
        tensor: On the host or the device. Pinned memory of the host is read later: it
            must not change until the device has reached what follows.
        device: Where it is used.
    """
    if tensor.device == device:
        return tensor
    source = tensor.contiguous()
    if device.type == "cuda":
        source = source.pin_memory()
    return source.to(device, non_blocking=True)
