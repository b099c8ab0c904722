"""Plots the simulated schedule: rows by phase, and the busy link."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from vericache_sglang.simulation.link import Copy

PHASES = ("plain", "draft", "verify", "wait")


@dataclass(slots=True)
class Timeline:
    """Forwards and copies of one simulated run.

    Attributes:
        forwards: (start, end, rows by phase), in seconds and in order.
        to_device: Copies to the device.
        to_host: Copies to the host.
    """

    forwards: list[tuple[float, float, dict[str, int]]] = field(default_factory=list)
    to_device: list[Copy] = field(default_factory=list)
    to_host: list[Copy] = field(default_factory=list)


def draw(timelines: Mapping[str, Timeline], file: Path, seconds: float) -> None:
    """Write a PNG: for each policy the rows of each forward and the link below them.

    Args:
        timelines: By policy.
        file: Path of the PNG.
        seconds: Length of the plotted end of each run, in seconds.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 2.6 * len(timelines) + 0.6), layout="constrained")
    figure.suptitle("SIMULATED schedule: requests by phase, and link copies")
    grid = figure.subplots(
        2 * len(timelines), 1, squeeze=False, height_ratios=[4, 1] * len(timelines)
    )
    for index, (name, timeline) in enumerate(timelines.items()):
        rows, link = grid[2 * index][0], grid[2 * index + 1][0]
        end = timeline.forwards[-1][1] if timeline.forwards else seconds
        start = max(0.0, end - seconds)
        shown = [each for each in timeline.forwards if each[1] > start]
        edges = [each[0] for each in shown]
        rows.stackplot(
            edges,
            *([each[2].get(phase, 0) for each in shown] for phase in PHASES),
            labels=PHASES,
            step="post",
        )
        rows.set_ylabel(f"{name}\nrequests")
        rows.set_xlim(start, end)
        for copies, level, colour in (
            (timeline.to_device, 1, "tab:red"),
            (timeline.to_host, 0, "tab:gray"),
        ):
            bars = [(c.start, c.seconds) for c in copies if c.end > start]
            link.broken_barh(bars, (level + 0.1, 0.8), color=colour)
        link.set_xlim(start, end)
        link.set_ylim(0, 2)
        link.set_yticks([0.5, 1.5], ["to host", "to device"])
        link.set_xlabel("simulated time in s")
    if timelines:
        grid[0][0].legend(loc="upper right", ncols=len(PHASES))
    figure.savefig(file, dpi=110)
