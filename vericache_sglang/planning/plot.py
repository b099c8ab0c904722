"""Plots of ``plan``: speedup over draft length, or over the sizes of two pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.pools import PAPER_BEST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from vericache_sglang.planning.pools import Sweep


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of the plot.

    Attributes:
        label: Name in the legend.
        points: (draft length in tokens, accepted over drafted, speedup).
    """

    label: str
    points: tuple[tuple[int, float, float], ...]


def save(figure: Figure, path: Path) -> None:
    """Write a figure: as SVG where the name ends so, else as PNG, 160 dots per inch.

    Raises:
        ConfigError: ``path`` cannot be written.
    """
    try:
        if path.suffix == ".svg":
            figure.savefig(path, format="svg", metadata={"Date": None})
        else:
            figure.savefig(path, format="png", dpi=160)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error}") from error


def lengths_figure(curves: Sequence[Curve], title: str) -> Figure:
    """Return acceptance rate (left) and speedup (right) over draft length.

    Raises:
        ConfigError: matplotlib is missing.
    """
    figure = _figure(title)
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
    return figure


def sweeps_figure(curves: Mapping[str, Sequence[Sweep]], title: str) -> Figure:
    """Return one plot of each sweep of two pools.

    Args:
        curves: The same sweeps by the name of the curve.
        title: Of the figure.

    Raises:
        ConfigError: matplotlib is missing.
    """
    figure = _figure(title)
    (first, *_) = curves.values()
    for index, axes in enumerate(figure.subplots(1, len(first))):
        label = first[index].label
        for name, found in curves.items():
            axes.plot(*zip(*found[index].points, strict=True), marker=".", label=name)
        axes.axhline(1, color="grey", linewidth=1, linestyle="--")
        axes.axvline(
            PAPER_BEST[label], color="grey", linestyle=":", label="highest in the paper"
        )
        axes.set(xlabel=label, ylabel="throughput / B1 and B2's (x)")
        axes.set(ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _figure(title: str) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title)
    return figure
