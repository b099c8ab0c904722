"""The page of ``vericache_sglang.divergence``: two tables and four plots."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.picture import color_of, require_matplotlib, save_svg
from vericache_sglang.evaluation.quality import curve
from vericache_sglang.evaluation.report import markdown_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LEGEND = """\
Brackets are 95 % bootstrap intervals over samples. `KL/step` and `KL/sequence`: nats of
KL(full KV || system), after sequences that plain SGLang sampled at temperature
{temperature}, from the {top_k} most probable tokens of both, all others as one
outcome: a lower bound, and exact where that is the vocabulary. A sequence has at most
{kl_tokens} tokens; its first one is left out. `{again}` is plain SGLang against itself
at another batch size: the effect of arithmetic in another order. VeriCache's KL is of
its verified distributions. `first differing token`: median over the answers that
differ, and how many they are. `same tokens`: share of positions with the same token.
`F1` and `ROUGE-L` are against the full KV's answer.
"""


def page(report: Mapping[str, Any]) -> str:
    """Return the Markdown page of a report; rows may be missing."""
    origin, options = report["provenance"], report["options"]
    rows = report.get("rows", [])
    hardware, versions = origin["hardware"], origin["versions"]
    machine = ", ".join(hardware["gpus"]) or hardware["cpu"]
    head = (
        f"{options['model']}, {options['samples']} samples of each task, data: "
        f"{options['data']}. {machine}, SGLang {versions['sglang']}, torch "
        f"{versions['torch']}, commit {origin['commit']}, {origin['date'][:10]}."
    )
    parts = ["# Divergence from the full KV", f"    {origin['command']}", head]
    if options["out"] and rows:
        name = Path(options["out"]).with_suffix(".svg").name
        parts.append(f"![KL, first divergence and scores]({name})")
    parts += task_tables(rows)
    legend = LEGEND.format(
        temperature=options["temperature"],
        top_k=report.get("top_k", "-"),
        kl_tokens=options["kl_tokens"],
        again="full KV, all at once",
    )
    failures = [f"- {text}" for text in report.get("failures", ())]
    parts += [legend, *(["## Failures", "\n".join(failures)] if failures else [])]
    return "\n\n".join(parts).rstrip() + "\n"


def task_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return headings and tables of each task: scores, and distances of some rows."""
    parts = []
    for task in rows[0]["tasks"] if rows else ():
        named = [*rows[0]["tasks"][task]["scores"]]
        alike = ["F1", "ROUGE-L", "same tokens", "first differing token"]
        heads = ["system", *named, *alike]
        scored = [row for row in rows if "scores" in row["tasks"][task]]
        cells = [
            [
                row["name"],
                *(_cell(row["tasks"][task]["scores"][name]) for name in named),
                *(_cell(row["tasks"][task][n]) for n in ("word_f1", "rouge_l")),
                _cell(row["tasks"][task]["token_match"]),
                _first(row["tasks"][task]["first_divergence"]),
            ]
            for row in scored
        ]
        parts += [f"## {task}", markdown_table(heads, cells)]
        apart = [row for row in rows if "steps" in row["tasks"][task]]
        columns = {"KL/step": "kl_per_step", "KL/sequence": "kl_per_sequence"}
        if apart:
            cells = [
                [
                    row["name"],
                    *(_cell(row["tasks"][task][key], 6) for key in columns.values()),
                    str(sum(map(len, row["tasks"][task]["steps"]))),
                ]
                for row in apart
            ]
            parts.append(markdown_table(["system", *columns, "tokens"], cells))
    return parts


def _cell(found: Mapping[str, float] | None, digits: int = 2) -> str:
    if found is None:
        return "-"
    shown = [f"{found[name]:.{digits}f}" for name in ("value", "low", "high")]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _first(found: Sequence[int | None]) -> str:
    differ = [at for at in found if at is not None]
    middle = f"{statistics.median(differ):g}, " if differ else ""
    return f"{middle}{len(differ)} of {len(found)}"


def draw_page(report: Mapping[str, Any], path: Path) -> None:
    """Write the SVG of a report.

    Args:
        report: With its rows.

    Raises:
        ConfigError: matplotlib is missing, or ``path`` cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = report["rows"]
    figure = Figure(figsize=(12, max(9.0, 4.0 + 0.4 * len(rows))), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    for row, style in _styles(rows):
        means, sums = curve(_steps(row))
        steps = range(1, len(means) + 1)
        axes[0].plot(steps, means, linewidth=1, **style)
        axes[1].plot(steps, sums, **style)
    axes[0].set_yscale("symlog", linthresh=1e-5)
    axes[0].set(title="Per step", xlabel="decoded token t", ylabel="KL_t, nats")
    axes[1].set(
        title="Accumulated", xlabel="decoded token t", ylabel="KL of the first t, nats"
    )
    _draw_first(axes[2], rows)
    _draw_scores(axes[3], rows)
    for axis in axes[:3]:
        axis.grid(alpha=0.3)
    names = axes[1].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=3)
    figure.suptitle(f"{Path(report['options']['model']).name}: distance from full KV")
    save_svg(figure, path)


def _styles(
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Yield the rows with curves and their lines: a color for each compressor."""
    colors: dict[str, Any] = {}
    for row in rows:
        if _steps(row):
            compressor = row["name"].removeprefix(row["system"])
            color = colors.setdefault(compressor, color_of(len(colors)))
            dashes = {"lossy": "-", "VeriCache": "--"}.get(row["system"], ":")
            yield row, {"color": color, "linestyle": dashes, "label": row["name"]}


def _steps(row: Mapping[str, Any]) -> list[list[float]]:
    return [each for task in row["tasks"].values() for each in task.get("steps", ())]


def _draw_first(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the share of answers that have differed by a position."""
    for row, style in _styles(rows):
        found = [
            at
            for task in row["tasks"].values()
            for at in task.get("first_divergence", ())
        ]
        differ = sorted(at for at in found if at is not None)
        if found:
            shares = [(k + 1) / len(found) for k in range(len(differ))]
            axis.step([0, *differ], [0.0, *shares], where="post", **style)
    axis.set(
        title="Answers that differ from the full KV's",
        xlabel="output token",
        ylabel="share of answers",
        ylim=(-0.03, 1.03),
    )


def _draw_scores(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a table of each task's first score over the full KV's, and of F1."""
    shown = [row for row in rows if row["system"] in {"lossy", "VeriCache"}]
    wanted = rows[0]["tasks"]
    tasks = [name for name, task in wanted.items() if task["scores"]]
    shares: list[list[float]] = []
    for at, row in enumerate(shown):
        shares.append([])
        for column, task in enumerate(tasks):
            name, whole = next(iter(wanted[task]["scores"].items()))
            got = row["tasks"][task]["scores"][name]["value"]
            share = got / whole["value"] if whole and whole["value"] else 0.0
            shares[-1].append(share)
            f1 = row["tasks"][task]["word_f1"]["value"]
            cell = f"{share:.2f}  (F1 {f1:.2f})"
            axis.text(column, at, cell, ha="center", va="center", fontsize=6)
    if shown:
        axis.imshow(shares, cmap="RdYlGn", vmin=0.0, vmax=1.3, alpha=0.7, aspect="auto")
    axis.set_xticks(range(len(tasks)), tasks, fontsize=7)
    axis.set_yticks(range(len(shown)), [row["name"] for row in shown], fontsize=7)
    axis.set(title="Task score over the full KV's (F1 of the text)")
