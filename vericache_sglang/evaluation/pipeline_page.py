"""The pages of benchmarks that serve systems on the data sets, and their plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.divergence_page import task_tables
from vericache_sglang.evaluation.figures import DEFINITIONS, middle
from vericache_sglang.evaluation.picture import (
    color_of,
    legend_beside,
    require_matplotlib,
    save_svg,
)
from vericache_sglang.evaluation.report import (
    DRAFTING,
    OPEN_LOOP,
    SPEED,
    systems_table,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Row = Mapping[str, Any]

PREFILL = {
    "cached": "prompts are in the prefix cache before the clock starts",
    "timed": "prefills are timed",
}

TURNS = {
    False: "by turns with plain SGLang, ratios are to its pass in the same round",
    True: "one server at a time, ratios are to `full KV`",
}

LEGEND = """\
Everything here is MEASURED. `tokens/s` and latencies: the samples' first requests,
greedy, {clients} at once, {prefill}; {turns} ({note}).
`mismatches`: answers of these requests whose tokens are not the full KV's.
Scores, F1 and KL: conversations as each data set's own runner asks, see
[evaluation.md](../../docs/evaluation.md). A replay begins sessions so that about so
many requests a second arrive; each turn waits for the one before it and its recorded
pause, from an empty prefix cache."""


def pipeline_page(report: Row) -> str:
    """Return the Markdown page of pipeline 1; rows may be missing."""
    parts = ["# Pipeline 1: long contexts on one server (MEASURED)", *measured(report)]
    return "\n\n".join(parts) + "\n"


def measured(report: Row) -> list[str]:
    """Return the parts below a page's heading: origin, tables, what is left out."""
    origin, options = report["provenance"], report["options"]
    hardware, versions = origin["hardware"], origin["versions"]
    machine = ", ".join(hardware["gpus"]) or f"{hardware['cpu']}, no GPU"
    # Rows that --resume found in the file were measured by earlier commits.
    rows, prompts = report.get("rows", []), report["prompts"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    parts = [
        f"    {origin['command']}",
        f"{options['model']}, data: {options['data']}, {options['samples']} samples of "
        f"each task, prompts of {prompts['mean_tokens']:.0f} tokens in the mean and "
        f"{prompts['max_tokens']} at most. "
        f"{machine}, SGLang {versions['sglang']}, torch {versions['torch']}, commit "
        f"{commits or origin['commit']}, {origin['date'][:10]}.",
    ]
    if options["out"] and rows:
        name = Path(options["out"]).with_suffix(".svg").name
        parts.append(f"![quality, speed and latency]({name})")
    good = [row for row in with_ratios(rows) if "error" not in row]
    if good:
        parts.append(_legend(good, options))
        parts += _tables(good)
    lines = [f"- {name}: {why}." for name, why in report.get("left_out", {}).items()]
    if lines:
        parts.append("## Not measured by this command\n\n" + "\n".join(lines))
    failures = [f"- {text}" for text in report.get("failures", ())]
    if failures:
        parts.append("## Failures\n\n" + "\n".join(failures))
    return parts


def with_ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows with a ``ratio``: tokens/s over the full KV's with the same pool.

    Where passes did not alternate, it is over the median of the full KV's own row.
    """
    found = []
    for row in rows:
        full = next((each for each in rows if _is_full(each, row.get("pool"))), None)
        ratio = row.get("ratio")
        if not ratio and full and full.get("tokens_per_s") and row.get("rounds"):
            base = full["tokens_per_s"]["median"]
            ratio = middle([each["tokens_per_s"] / base for each in row["rounds"]])
        found.append({**row, "ratio": ratio})
    return found


def _is_full(row: Row, pool: int | None) -> bool:
    return row["name"].split(",")[0] == "full KV" and row.get("pool") == pool


def _legend(rows: Sequence[Row], options: Row) -> str:
    again = next((row for row in rows if row["name"] == "full KV, again"), None)
    found = again and again["ratio"]
    noise = f"{found['median']:.2f}" if found else "not measured"
    note = f"`full KV, again`, which is noise: {noise}"
    clients, prefill = options["clients"], PREFILL[options["prefill"]]
    turns = TURNS[options["one_at_a_time"]]
    about = [f"- `{row['name']}`: {row['about']}." for row in rows if row["about"]]
    legend = LEGEND.format(clients=clients, prefill=prefill, turns=turns, note=note)
    return "\n\n".join([legend, *(["\n".join(about)] if about else [])])


def _tables(rows: Sequence[Row]) -> list[str]:
    whole = [(row["name"], row) for row in rows if not row.get("pool")]
    pools = [(row["name"], row) for row in rows if row.get("pool")]
    parts = [
        f"## Speed (MEASURED)\n\n{systems_table(whole, SPEED)}",
        f"## Drafting and answers (MEASURED)\n\n{systems_table(whole, DRAFTING)}",
    ]
    for title, key in (
        ("Latency over Poisson arrivals", "open_loop"),
        ("Latency of replayed sessions", "replay"),
    ):
        if found := [(name, each) for name, row in whole for each in row[key]]:
            parts.append(f"## {title} (MEASURED)\n\n{systems_table(found, OPEN_LOOP)}")
    if pools:
        parts.append(f"## Smaller pools (MEASURED)\n\n{systems_table(pools, SPEED)}")
    text = "\n\n".join(["## Quality (MEASURED)", *task_tables([r for _, r in whole])])
    parts.append(text.replace("\n## ", "\n### "))
    shown = ("tokens_per_s", "latency_s", "accepted")
    parts.append("\n".join(f"- `{name}`: {DEFINITIONS[name]}." for name in shown))
    return parts


def quality(row: Row, full: Row) -> float | None:
    """Return the mean over tasks of the first score over the full KV's.

    Tasks without a score, or which the full KV fails, do not count; None: none does.
    """
    parts = []
    for name, task in full["tasks"].items():
        first = next(iter(task["scores"].values()), None)
        got = next(iter(row["tasks"].get(name, {}).get("scores", {}).values()), None)
        if first and first["value"] and got:
            parts.append(got["value"] / first["value"])
    return sum(parts) / len(parts) if parts else None


def draw_pipeline(report: Row, path: Path) -> None:
    """Write an SVG: quality over throughput, latency over rates, speed over pools.

    Raises:
        ConfigError: matplotlib is missing, or ``path`` cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = [row for row in with_ratios(report["rows"]) if "error" not in row]
    panels = [_draw_quality]
    if any(row["open_loop"] for row in rows):
        panels += [_draw_rates("open_loop", "Poisson arrivals")]
    if any(row["replay"] for row in rows):
        panels += [_draw_rates("replay", "Replayed sessions")]
    if any(row.get("pool") for row in rows):
        panels += [_draw_pools]
    down = -(-len(panels) // 2)
    figure = Figure(figsize=(17, 4.6 * down), layout="constrained")
    axes = figure.subplots(down, 2, squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.remove()
    for panel, axis in zip(panels, axes, strict=False):
        panel(axis, rows)
        axis.set_ylim(bottom=-0.03 * axis.get_ylim()[1])  # a score may be 0
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        legend_beside(axis)
    hardware = report["provenance"]["hardware"]
    machine = ", ".join(hardware["gpus"]) or hardware["cpu"]
    model = Path(report["options"]["model"]).name
    figure.suptitle(f"MEASURED: {model} on {machine}")
    save_svg(figure, path)


def _draw_quality(axis: Any, rows: Sequence[Row]) -> None:
    full = next(row for row in rows if _is_full(row, None))
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        score = quality(row, full)
        if score is not None and row["ratio"] and not row.get("pool"):
            name = row["name"].split(",")[0] if row["lossy"] else row["name"]
            lines.setdefault(name, []).append((row["ratio"]["median"], score))
    for i, (name, points) in enumerate(lines.items()):
        style = "x:" if name.startswith("lossy") else "o"
        axis.plot(*zip(*points, strict=True), style, color=color_of(i), label=name)
    axis.set(
        title="Quality over throughput",
        xlabel="tokens/s / full KV's",
        ylabel="task score / full KV's, mean over tasks",
    )


def _draw_rates(key: str, title: str) -> Any:
    def panel(axis: Any, rows: Sequence[Row]) -> None:
        for i, row in enumerate(row for row in rows if row[key]):
            found = [each for each in row[key] if each["latency_s"]]
            rates = [each["rate"] for each in found]
            for share, style in (("p50", "o-"), ("p99", "x:")):
                values = [each["latency_s"][share] for each in found]
                label = row["name"] if share == "p50" else None
                axis.plot(rates, values, style, color=color_of(i), label=label)
        axis.set(
            title=f"{title}: p50, dotted p99",
            xlabel="requests/s",
            ylabel="whole answer, seconds",
        )

    return panel


def _draw_pools(axis: Any, rows: Sequence[Row]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.get("pool") and row["ratio"]:
            name = row["name"].rpartition(", pool")[0]
            point = (row["pool"], row["ratio"]["median"])
            lines.setdefault(name, []).append(point)
    for name, points in lines.items():
        axis.plot(*zip(*sorted(points), strict=True), "o-", label=name)
    axis.set(
        title="Throughput over the pool",
        xlabel="KV slots",
        ylabel="tokens/s / full KV's in the same pool",
    )
