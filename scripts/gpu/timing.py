"""How long a call takes on a device, and how fast the device copies."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
WARM_CALLS = 3


def seconds_of(call: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median seconds of a call; on a GPU between two events of its stream.

    Args:
        call: Queues work on the current stream; on a CPU does it.
        device: "cuda" or "cpu".
        repeats: Timed calls, after ``WARM_CALLS``.
    """
    for _ in range(WARM_CALLS if device == "cuda" else 1):
        call()
    if device == "cpu":
        return statistics.median(_on_cpu(call) for _ in range(repeats))
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)
    ]
    # Behind a long kernel all are queued before the first runs: none waits for the
    # host, whose launches would be timed otherwise.
    torch.cuda._sleep(50_000_000)
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in events)


def copy_rate(device: str, mib: int = 1024, repeats: int = 20) -> float:
    """Return the bytes a second that a device reads and writes while it copies.

    Args:
        device: "cuda" or "cpu".
        mib: MiB copied; far more than any cache holds.
        repeats: Copies; the median counts.
    """
    source = torch.zeros(mib * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device, repeats)
    return 2 * source.nbytes / seconds


def link_rate(piece: int, *, to_device: bool, whole: int = 256 * MIB) -> float:
    """Return the bytes a second of copies between pinned host memory and the GPU.

    Args:
        piece: Bytes of one copy.
        to_device: Direction.
        whole: Bytes copied, piece after piece, none waited for.
    """
    host = torch.empty(whole, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(whole, dtype=torch.uint8, device="cuda")
    source, target = (host, device) if to_device else (device, host)
    pieces = [
        (target[at : at + piece], source[at : at + piece])
        for at in range(0, whole - piece + 1, piece)
    ]

    def copy() -> None:
        for into, out in pieces:
            into.copy_(out, non_blocking=True)

    return len(pieces) * piece / seconds_of(copy, "cuda", 5)


def _on_cpu(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
