"""Draws a benchmark's results: speed, waits and, where measured, load curves."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from matplotlib.figure import Figure

Systems = dict[str, dict[str, Any]]

SHARES = {"p50": 0.9, "p90": 0.6, "p99": 0.3}
"""Percentiles drawn as bars of a group, and how strong each is."""


def require_matplotlib() -> None:
    """Check that pictures can be drawn.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "the picture needs matplotlib: pip install matplotlib"
        ) from error


def color_of(number: int) -> Any:
    """Return one of 20 colors."""
    from matplotlib import colormaps

    return colormaps["tab20"](2 * (number % 10) + number // 10 % 2)


def legend_beside(axis: Any) -> None:
    """Draw a legend on the right of a plot, where it covers nothing."""
    beside = {"bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0}
    axis.legend(fontsize=8, loc="upper left", **beside)


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of ``figure_of``; a label is its title in the file too.

    Args:
        report: See ``as_json``.

    Raises:
        ConfigError: matplotlib is missing, or ``path`` cannot be written.
    """
    figure = figure_of(report)
    try:
        title = {"Title": report["label"] or "Benchmark"}
        figure.savefig(path, format="png", dpi=120, metadata=title)
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error}") from error


def figure_of(report: Mapping[str, Any]) -> Figure:
    """Return a figure with a panel for each kind of figure the report has.

    Raises:
        ConfigError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    systems = {
        name: row for name, row in report["systems"].items() if row["tokens_per_s"]
    }
    panels: list[Callable[[Any, Systems], None]] = [_speed, _first, _waits]
    if any(len(row["tuning"]) > 1 for row in systems.values()):
        panels.append(_tuning)
    if any(row["open_loop"] for row in systems.values()):
        panels.append(_open_loop)
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(12, 4.2 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, 2).flatten()
    for panel, axis in zip(panels, axes, strict=False):
        panel(axis, systems)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(_title(report), fontsize=11)
    return figure


def draw_sweep(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write an SVG of the speed over plain SGLang's by context length.

    Args:
        rows: With ``context`` (tokens), ``requests`` and ``ratios`` of the pairs.

    Raises:
        ConfigError: matplotlib is missing, or ``path`` cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axis = figure.subplots()
    lines: dict[int, list[tuple[int, list[float]]]] = {}
    for row in rows:
        lines.setdefault(row["requests"], []).append((row["context"], row["ratios"]))
    for i, (requests, points) in enumerate(sorted(lines.items())):
        points.sort()
        middle = [median(ratios) for _, ratios in points]
        below = [
            at - min(ratios) for at, (_, ratios) in zip(middle, points, strict=True)
        ]
        above = [
            max(ratios) - at for at, (_, ratios) in zip(middle, points, strict=True)
        ]
        contexts = [context for context, _ in points]
        label = f"{requests} at once"
        axis.errorbar(
            contexts,
            middle,
            [below, above],
            marker="o",
            capsize=3,
            color=f"C{i}",
            label=label,
        )
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_xscale("log")
    ticks = sorted({context for points in lines.values() for context, _ in points})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.set(xlabel="prompt tokens", ylabel="decoding speed / plain SGLang's")
    axis.legend(fontsize=8)
    save_svg(figure, path)


def save_svg(figure: Figure, path: Path) -> None:
    """Write a figure; the same one makes the same file.

    Raises:
        ConfigError: ``path`` cannot be written.
    """
    from matplotlib import rc_context

    try:
        with rc_context({"svg.hashsalt": "vericache"}):
            figure.savefig(path, format="svg", metadata={"Date": None})
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _title(report: Mapping[str, Any]) -> str:
    hardware = report["provenance"]["hardware"]
    machine = ", ".join(hardware["gpus"]) or hardware["cpu"]
    model = Path(report["options"].get("model", "given servers")).name
    text = f"{model} on {machine}"
    return f"{report['label']}\n{text}" if report["label"] else text


def _speed(axis: Any, systems: Systems) -> None:
    for i, row in enumerate(systems.values()):
        found = row["tokens_per_s"]
        below, above = found["median"] - found["min"], found["max"] - found["median"]
        axis.bar(i, found["median"], yerr=[[below], [above]], capsize=5, color=f"C{i}")
        ratio = row["ratio"]
        note = f"{ratio['median']:.2f}x" if ratio else ""
        axis.annotate(
            note,
            (i, 0),
            (0, 6),
            textcoords="offset points",
            ha="center",
            color="white",
            weight="bold",
        )
    _name(axis, systems)
    axis.set(
        ylabel="output tokens/s", title="Throughput: median, least, greatest; x plain"
    )


def _first(axis: Any, systems: Systems) -> None:
    _groups(axis, systems, "ttft_s", 1.0)
    axis.set(ylabel="seconds", title="Time to the first token")


def _waits(axis: Any, systems: Systems) -> None:
    _groups(axis, systems, "itl_s", 1e3)
    # Later tokens of a burst wait 0 ms, its first one a whole draft-verify cycle.
    axis.set_yscale("symlog", linthresh=1.0)
    axis.set(ylabel="ms (log above 1)", title="Wait between tokens")


def _groups(axis: Any, systems: Systems, key: str, scale: float) -> None:
    for i, row in enumerate(systems.values()):
        found = row[key]
        if found is None:
            continue
        for j, (share, strength) in enumerate(SHARES.items()):
            at = i + 0.27 * (j - 1)
            value = found[share] * scale
            axis.bar(at, value, 0.25, color=f"C{i}", alpha=strength)
            axis.annotate(
                f"{value:.0f}" if value >= 100 else f"{value:.3g}",
                (at, value),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
    for share, strength in SHARES.items():
        axis.bar(0, 0, color="grey", alpha=strength, label=share)
    axis.legend()
    _name(axis, systems)


def _tuning(axis: Any, systems: Systems) -> None:
    for i, (name, row) in enumerate(systems.items()):
        tried = sorted(row["tuning"], key=lambda each: each["concurrency"])
        axis.plot(
            [each["concurrency"] for each in tried],
            [each["tokens_per_s"] for each in tried],
            marker="o",
            color=f"C{i}",
            label=name,
        )
    axis.xaxis.get_major_locator().set_params(integer=True)
    _finish(axis, "clients at once", "output tokens/s", "Throughput over clients")


def _open_loop(axis: Any, systems: Systems) -> None:
    for i, (name, row) in enumerate(systems.items()):
        found = [each for each in row["open_loop"] if each["latency_s"]]
        rates = [each["rate"] for each in found]
        for share, style in (("p50", "o-"), ("p99", "x:")):
            axis.plot(
                rates,
                [each["latency_s"][share] for each in found],
                style,
                color=f"C{i}",
                label=f"{name} {share}",
            )
    _finish(axis, "requests/s (Poisson)", "seconds", "Whole answer over arrival rate")


def _finish(axis: Any, xlabel: str, ylabel: str, title: str) -> None:
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axis.set(xlim=(0, None), ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _name(axis: Any, systems: Systems) -> None:
    labels = [f"{name}\n{row['concurrency']} clients" for name, row in systems.items()]
    axis.set_xticks(range(len(systems)), labels)
    axis.margins(y=0.12)  # room for the numbers above the bars
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
