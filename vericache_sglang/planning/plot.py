"""Plots speedup and acceptance rate over draft length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of the plot.

    Attributes:
        label: Name in the legend.
        points: (draft length in tokens, accepted over drafted, speedup).
    """

    label: str
    points: tuple[tuple[int, float, float], ...]


def draw(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Write a PNG of 1600 x 720 pixels: acceptance rate left, speedup right.

    Raises:
        ConfigError: matplotlib is missing, or ``path`` cannot be written.
    """
    figure = figure_of(curves, title)
    try:
        figure.savefig(path, format="png", dpi=160)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error}") from error


def figure_of(curves: Sequence[Curve], title: str) -> Figure:
    """Return the figure that ``draw`` writes.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    rates, speeds = figure.subplots(1, 2)
    for curve in curves:
        lengths, rate, speed = zip(*curve.points, strict=True)
        rates.plot(lengths, rate, marker=".", label=curve.label)
        speeds.plot(lengths, speed, marker=".", label=curve.label)
    rates.set(ylabel="accepted / drafted", ylim=(0, 1.02))
    speeds.set(ylabel="throughput / full KV's (x)", ylim=(0, None))
    speeds.axhline(1, color="grey", linewidth=1, linestyle="--", label="full KV")
    for axes in (rates, speeds):
        axes.set_xlabel("draft length (tokens)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    return figure
