"""The parts, in the order they run; each has a module of its name here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from gpu.part import Part

if TYPE_CHECKING:
    from gpu.part import PartModule

SERVERS = ("torch", "sglang")
TESTS = ("torch", "pytest", "hypothesis")

PARTS = {
    part.name: part
    for part in (
        Part("device", "what the device is and how fast it copies", 0.5, ("torch",)),
        Part("wheels", "installs carried wheels, checks that their ops load", 2),
        Part("kernels", "tests/kernels, on the device", 5, TESTS),
        Part("floors", "each kernel's time over that of its bytes", 2, ("torch",)),
        Part("boot", "one request to a tiny model, eager and with graphs", 4, SERVERS),
        Part("lossless", "tokens equal to plain SGLang's; flip rates", 12, SERVERS),
        Part("throughput", "tokens per second against plain SGLang", 25, SERVERS),
        Part("gaps", "idle time between kernels, waits of the host", 4, SERVERS),
    )
}


def module_of(part: Part) -> PartModule:
    """Return the module that does a part."""
    return cast("PartModule", importlib.import_module(f"gpu.parts.{part.name}"))
