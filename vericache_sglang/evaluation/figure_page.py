"""The page and the plots of the paper's figures, from a report's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.picture import (
    color_of,
    legend_beside,
    require_matplotlib,
    save_svg,
)
from vericache_sglang.evaluation.report import markdown_table
from vericache_sglang.simulation.report import LABEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Row = Mapping[str, Any]

MEASURED = "MEASURED"
"""First word of columns that servers were started for."""


def figures_of(report: Row) -> list[Row]:
    """Return the rows of a report that are figures; the others are systems."""
    rows = report.get("rows", ())
    return [row for row in rows if "columns" in row and "error" not in row]


def page(report: Row) -> str:
    """Return the tables of all figures as Markdown; rows may be missing."""
    origin, options = report["provenance"], report["options"]
    hardware = origin["hardware"]
    machine = ", ".join(hardware["gpus"]) or f"{hardware['cpu']}, no GPU"
    parts = [
        "# The paper's figures, one table each",
        f"Written by `{origin['command']}`. Planned: the paper's equations with the "
        "assumptions of [paper_vs_ours.md](paper_vs_ours.md). Columns that say "
        f"SIMULATED: {LABEL.removeprefix('SIMULATED: ')} A dash: not in the paper's "
        "text, or not known at this point.",
        "Where only two or three full KVs fit (Llama-70B), the staging buffer, which "
        "takes a whole residual KV, takes the place of requests, and the simulated "
        "server is slower than full KV unless drafts are long: the paper's equations "
        "count the staging that is in use on average.",
    ]
    if options["planned_only"]:
        parts.append("Nothing here is a measurement: `--planned-only` was given.")
    else:
        model = options["model"] or "the demo models"
        parts.append(
            f"Columns that say {MEASURED}: {model} on {machine}, SGLang "
            f"{origin['versions']['sglang']}, data: {options['data']}, "
            f"{options['samples']} samples of each task, prompts of up to "
            f"{options['context']} tokens. They are no measurement of the paper's "
            "models or GPUs, and stand beside its values. VeriCache there drafts where "
            "it predicts that this pays, which short prompts on a CPU rarely do; rows "
            "that always draft run KVzip's probes within the time that is measured. "
            "Answers that were always drafted and verified: "
            "[divergence.md](divergence.md)."
        )
    parts += [_table(row) for row in figures_of(report)]
    lines = [f"- {name}: {why}." for name, why in report.get("left_out", {}).items()]
    parts.append("## Left out\n\n" + "\n".join(lines))
    if failures := [f"- {text}" for text in report.get("failures", ())]:
        parts.append("## Failures\n\n" + "\n".join(failures))
    return "\n\n".join(parts) + "\n"


def _table(row: Row) -> str:
    lines = [
        [str(point), *(_cell(values[i]) for values in row["columns"].values())]
        for i, point in enumerate(row["points"])
    ]
    table = markdown_table([row["x"], *row["columns"]], lines)
    return f"## {row['name']}\n\n{row['title']}; {row['y']}.\n\n{table}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def draw(report: Row, path: Path) -> None:
    """Write one SVG with a plot for each figure.

    Raises:
        ConfigError: matplotlib is missing, or ``path`` cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = figures_of(report)
    down = -(-len(rows) // 2)
    figure = Figure(figsize=(17, 4.4 * max(1, down)), layout="constrained")
    axes = figure.subplots(max(1, down), 2, squeeze=False).flatten()
    for axis, row in zip(axes, rows, strict=False):
        (_draw_across if row["across"] else _draw_columns)(axis, row)
        axis.set(title=row["name"], ylabel=row["y"])
        axis.set_ylim(bottom=-0.03 * max(axis.get_ylim()[1], 1e-9))
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            legend_beside(axis)
    for axis in axes[len(rows) :]:
        axis.remove()
    save_svg(figure, path)


def _draw_columns(axis: Any, row: Row) -> None:
    named = isinstance(row["points"][0], str)
    places: Sequence[Any] = range(len(row["points"])) if named else row["points"]
    for i, (name, values) in enumerate(row["columns"].items()):
        pairs = zip(places, values, strict=True)
        shown = [(x, y) for x, y in pairs if y is not None]
        if not shown:
            continue
        kind = name.split(",")[0].split()[0]
        style = {"paper": "*", MEASURED: "o--"}.get(kind, ".-")
        size = 12 if style == "*" else 6
        points = zip(*shown, strict=True)
        axis.plot(*points, style, ms=size, color=color_of(i), label=name)
    if named:
        turned = {"rotation": 20, "ha": "right", "fontsize": 8}
        axis.set_xticks(list(places), row["points"], **turned)
    axis.set(xlabel=row["x"])


def _draw_across(axis: Any, row: Row) -> None:
    """Draw the measured columns over the one that is the x axis, a mark a point."""
    columns = row["columns"]
    measured = [name for name in columns if name.startswith(MEASURED)]
    (name,) = (name for name in measured if name != row["across"])
    pairs = zip(row["points"], columns[row["across"]], columns[name], strict=True)
    for i, (point, x, y) in enumerate(pairs):
        if x is not None and y is not None:
            mark = "x" if point.startswith("lossy") else "o"
            axis.plot([x], [y], mark, color=color_of(i), label=point, alpha=0.8)
    axis.set(xlabel=row["across"])
    axis.set_xlim(left=0)
