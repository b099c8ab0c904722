"""How much a selector computes at once: memory on a host, launches on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HOST_ELEMENTS = 4 * 2**20
"""Most float32 elements of one intermediate tensor on a CPU (16 MiB a copy)."""

DEVICE_ELEMENTS = 2**25
"""The same on other devices, where launches cost more than 128 MiB a copy."""


def rows_at_once(elements: int, device: torch.device) -> int:
    """Return how many rows of so many elements are computed together, at least 1."""
    most = HOST_ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS
    return max(1, most // elements)
