"""Numbers the host has decided, on their way to the device without a wait."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def upload(
    device: torch.device | str, *columns: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Copy lists of numbers to a device, all in one copy.

    ``torch.tensor(numbers, device="cuda")`` copies from pageable memory and waits for
    the stream, and with it for the forward that runs.

    Args:
        device: Where they go.
        columns: Any number of lists, of any lengths.

    Returns:
        One int64 tensor for each.
    """
    lengths = [len(column) for column in columns]
    numbers = torch.tensor(list(chain.from_iterable(columns)), dtype=torch.int64)
    if torch.device(device).type == "cuda":
        numbers = numbers.pin_memory()
    parts: tuple[torch.Tensor, ...]
    parts = numbers.to(device, non_blocking=True).split(lengths)
    return parts
