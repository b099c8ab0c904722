"""Copies tensors to the device that uses them, without a host sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, without a host sync; itself if already there.

    Args:
        tensor: On the host or the device. The copy from pinned host memory is
            asynchronous: the tensor must not change until it has finished.
        device: Target device.
    """
    if tensor.device == device:
        return tensor
    source = tensor.contiguous()
    if device.type == "cuda":
        source = source.pin_memory()
    return source.to(device, non_blocking=True)
