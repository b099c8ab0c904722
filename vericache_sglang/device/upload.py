"""Copies of small tensors: asynchronous to the device, with one wait back."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def upload(
    device: torch.device | str, *columns: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Copy lists of integers to a device, all in one asynchronous copy.

    ``torch.tensor(numbers, device="cuda")`` copies from pageable memory and waits for
    the stream, and with it for the running forward.

    Args:
        device: Target device.
        columns: Any number of lists, of any lengths.

    Returns:
        One int64 tensor per list.
    """
    lengths = [len(column) for column in columns]
    numbers = torch.tensor(list(chain.from_iterable(columns)), dtype=torch.int64)
    parts: tuple[torch.Tensor, ...] = send(numbers, device).split(lengths)
    return parts


def send(numbers: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a CPU tensor to a device in one asynchronous copy."""
    if torch.device(device).type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def download(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy tensors of one device to the host, and wait once for all of them."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.current_stream().synchronize()
    return copies
