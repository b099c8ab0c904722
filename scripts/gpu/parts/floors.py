"""Each kernel's time at real shapes, over the time its bytes take at copy speed."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu.floor_shapes import SHAPES, TOY, Shape
from gpu.part import Check, Step, Summary, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu.part import Context

LEAST_SHARE = 0.70
"""Of the copy bandwidth, that a kernel bound by memory must reach."""

NAMES = (
    *("ragged attention, drafts", "ragged attention, 2 verifications"),
    "ragged attention, drafts and 2 verifications",
    *("packed attention, split planes E3M1", "packed attention, KIVI 2 bits"),
    *("packed attention, KIVI 4 bits", "packed attention, KVQuant 4 bits"),
    "packed attention, RotateKV 4 bits",
    *("split segment", "join segment", "join planes E3M1"),
    *("next tokens, greedy", "next tokens, drawn", "board commit"),
)
"""Of all cases; their modules need torch, this one must not."""


def steps(context: Context) -> list[Step]:
    """See ``gpu.part.PartModule``."""
    shapes = (TOY,) if context.rehearsal else SHAPES
    return [
        Step("copy", partial(copied, context.device), 20),
        *(
            Step(f"{shape.name}: {name}", partial(timed, name, shape, context.device))
            for shape in shapes
            for name in NAMES
        ),
    ]


def copied(device: str) -> dict[str, Any]:
    """Measure the rate that the others are compared with."""
    from gpu.timing import copy_rate

    on_cpu = device == "cpu"
    return {"bytes_per_s": copy_rate(device, 64 if on_cpu else 1024, 5)}


def timed(name: str, shape: Shape, device: str) -> dict[str, Any]:
    """Time one kernel at one shape; on a CPU as far as possible in the interpreter."""
    if device == "cpu":  # before any kernel is imported; this process does no more
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from gpu import floor_attention, floor_moves
    from gpu.timing import seconds_of

    cases = [*floor_attention.cases(), *floor_moves.cases()]
    case = next(case for case in cases if case.name == name)
    torch.manual_seed(0)
    timing = case.build(shape, device)
    seconds = seconds_of(timing.call, device, 3 if device == "cpu" else 50)
    nbytes = timing.nbytes
    del timing
    if device == "cuda":
        torch.cuda.empty_cache()
    return {
        "kernel_s": seconds,
        "bytes": nbytes,
        "bytes_per_s": nbytes / seconds,
        "memory_bound": case.memory_bound,
    }


def conclude(context: Context, results: Mapping[str, Any]) -> Summary:
    """See ``gpu.part.PartModule``."""
    rate = results.get("copy", {}).get("bytes_per_s", 0.0)
    rows, shares = [], {}
    for name, one in results.items():
        if "kernel_s" not in one:
            continue
        share = one["bytes_per_s"] / rate if rate else 0.0
        if one["memory_bound"]:
            shares[name] = share
        rows.append(
            (
                name,
                f"{one['kernel_s'] * 1e6:.1f}",
                f"{one['bytes'] / 1e6:.2f}",
                f"{one['bytes_per_s'] / 1e9:.1f}",
                f"{share:.0%}",
                "yes" if one["memory_bound"] else "no",
            )
        )
    columns = ("kernel", "us", "MB", "GB/s", "of copy speed", "bound by memory")
    worst = min(shares, key=lambda name: shares[name]) if shares else ""
    told = f"slowest of {len(shares)} bound by memory: {worst}" if worst else "none"
    checks = () if context.rehearsal else tuple(map(_check, shares, shares.values()))
    where = "Triton's interpreter or the reference, on a CPU" * context.rehearsal
    return Summary(
        headline=f"{told}, {shares.get(worst, 0.0):.0%} of copy speed",
        checks=checks,
        tables=(Table(f"Kernels{', in ' * bool(where)}{where}", columns, tuple(rows)),),
    )


def _check(name: str, share: float) -> Check:
    return Check(name, f">= {LEAST_SHARE:.0%}", f"{share:.0%}", share >= LEAST_SHARE)
