"""Chunk sizes of selectors: bound memory on a CPU, kernel launches on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HOST_ELEMENTS = 4 * 2**20
"""Maximum float32 elements of one intermediate tensor on a CPU (16 MiB)."""

DEVICE_ELEMENTS = 2**25
"""The same on other devices (128 MiB), where launches cost more than memory."""


def rows_at_once(elements: int, device: torch.device) -> int:
    """Return the number of rows to compute together, at least 1."""
    most = HOST_ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS
    return max(1, most // elements)
