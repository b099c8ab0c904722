"""The paper's figures by name: as printed, planned, and simulated (arXiv:2605.17613).

Planned values are the paper's equations (``vericache_sglang.planning``), simulated ones
the server's own scheduler on modelled hardware. Neither is a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.benchmark import Benchmark
from vericache_sglang.evaluation.picture import require_matplotlib, save_svg
from vericache_sglang.planning.acceptance import (
    PUBLISHED_LLAMA_70B,
    PUBLISHED_QWEN_32B,
    Geometric,
)
from vericache_sglang.planning.intra import full_kv, resident_drafts, search
from vericache_sglang.planning.paper import remote
from vericache_sglang.planning.paper.assumptions import (
    CONTEXT_TOKENS,
    DRAFT_LENGTH,
    KEEP,
    LLAMA,
    RTX,
    server,
)
from vericache_sglang.planning.paper.long_context import speedup
from vericache_sglang.planning.pools import SWEEPS, over_baseline
from vericache_sglang.simulation.policies import policies
from vericache_sglang.simulation.pools_report import over_simulated_baseline
from vericache_sglang.simulation.presets import Preset, costs_of
from vericache_sglang.simulation.remote import PoolsLoad
from vericache_sglang.simulation.report import LABEL
from vericache_sglang.simulation.server import SimulatedServer
from vericache_sglang.simulation.setup import Setup
from vericache_sglang.simulation.workload import RequestMix, closed_loop

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from vericache_sglang.evaluation.benchmark import Results

    Column = Callable[[Any, "Size"], float | None]
    """Value of a column at one point of the x axis; None where there is none."""

OVERHEAD_S = 2e-3
"""Added to every simulated forward, in seconds; as ``simulate``'s default."""

LEFT_OUT = {
    "fig4": "`bench divergence` measures it on a model of one's own",
    "fig9, fig10": "needs EAGLE3, which this project does not run yet",
    "fig12": "needs requests over time on a GPU: `bench pipeline1 --rates`",
    "fig14 to fig17": "needs quality and speed of the paper's models on a GPU: "
    "`bench pipeline1` with `--model` and `--data`",
}
"""The paper's other figures, and why they are not targets."""


@dataclass(frozen=True, slots=True)
class Size:
    """How long a simulated run is.

    Attributes:
        requests: Requests until it ends; a quarter of them is not measured.
        output: Tokens of each answer.
    """

    requests: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One figure of the paper.

    Attributes:
        title: What it shows, with what is assumed beyond the shared assumptions.
        x: Label of the x axis.
        y: Label of the y axis.
        points: Values of the x axis, numbers or names.
        columns: Name -> column; a name begins with paper, planned or SIMULATED.
    """

    title: str
    x: str
    y: str
    points: tuple[Any, ...]
    columns: Mapping[str, Column]


def printed(values: Mapping[Any, float]) -> Column:
    """Return the column of the values that the paper's text gives."""
    return lambda point, size: values.get(point)


@cache
def simulated(
    preset: Preset,
    policy: str,
    size: Size,
    keep: float = KEEP,
    draft_length: int = DRAFT_LENGTH,
    link_gb_per_s: float | None = None,
) -> float:
    """Return the tokens/s of one simulated policy, a closed loop of equal requests."""
    mix = RequestMix(
        contexts=(CONTEXT_TOKENS,), output=size.output, accept=preset.accept
    )
    setup = Setup(
        costs=costs_of(preset, link_gb_per_s, OVERHEAD_S),
        workload=closed_loop(mix, size.requests, warm=size.requests // 4),
        draft_length=draft_length,
    )
    return SimulatedServer(setup, policies(keep)[policy]).run().tokens_per_s


def gain(preset: Preset, policy: str, size: Size, **more: Any) -> float:
    """Return a simulated policy's throughput over that of full KV."""
    full = simulated(preset, "full-kv", size, **more)
    return simulated(preset, policy, size, **more) / full


def on(model: str, gpu: str = RTX, devices: int = 1) -> Preset:
    """Return a model on a machine with the acceptance of the shared assumptions."""
    accept = PUBLISHED_LLAMA_70B if model == LLAMA else PUBLISHED_QWEN_32B
    return Preset(
        model=model, gpu=gpu, devices=devices, accept=accept, accept_source="assumed"
    )


LLAMA_70B = on(LLAMA, "h100-nvl", 2)
MODELS = {
    "Mistral-24B": on("mistral-small-24b"),
    "Qwen-32B": on("qwen3-32b"),
    "Llama-70B": LLAMA_70B,
}
BUDGETS = {
    name: on(model)
    for name, model in (
        *(("Qwen-8B", "qwen3-8b"), ("Qwen-14B", "qwen3-14b")),
        *(("Mistral-24B", "mistral-small-24b"), ("Qwen-32B", "qwen3-32b")),
    )
}


def _acceptance_rate(survival: float, length: int, size: Size) -> float:
    return Geometric(survival).accepted(length, 0.25) / length


def _ideal(length: int, size: Size) -> float:
    shared = server(LLAMA, "h100-nvl", devices=2, printed_transfer=True)
    return speedup(shared, keep=0.25, draft_length=length)


def _planned(known: Mapping[str, Preset], ours: bool, name: str, size: Size) -> float:
    """Return tokens/s; of full KV unless ``ours``."""
    found = known[name]
    model = server(found.model, found.gpu, devices=found.devices)
    return (
        search(model, [KEEP], [DRAFT_LENGTH]) if ours else full_kv(model)
    ).tokens_per_s


def _planned_sparse(name: str, size: Size) -> float:
    model = server(BUDGETS[name].model, RTX)
    drafts = resident_drafts(model, KEEP, [DRAFT_LENGTH])
    return drafts.tokens_per_s / full_kv(model).tokens_per_s


def _ratio(above: Column, below: Column) -> Column:
    return lambda point, size: above(point, size) / below(point, size)  # type: ignore[operator]


def _link(ratio: float) -> float:
    """Return the GB/s of an H100 NVL's link at an HBM-to-link ratio."""
    machine = server("qwen3-32b", "h100-nvl").machine
    return machine.hbm_bytes_per_s / ratio / 1e9


def _planned_link(ratio: float, size: Size) -> float:
    model = server("qwen3-32b", "h100-nvl")
    machine = replace(model.machine, link_bytes_per_s=_link(ratio) * 1e9)
    return speedup(replace(model, machine=machine))


def _simulated_link(ratio: float, size: Size) -> float:
    preset = on("qwen3-32b", "h100-nvl")
    return gain(preset, "hybrid", size, link_gb_per_s=_link(ratio))


def _swept(label: str, simulates: bool, value: float, size: Size) -> float:
    """Return the speedup at one point of a sweep of two pools."""
    change, _ = SWEEPS[label]
    tokens = min(size.output, remote.OUTPUT_TOKENS)
    cluster = change(remote.cluster("mistral-small-24b", RTX, 1, tokens), value)
    if not simulates:
        return over_baseline(cluster)
    return over_simulated_baseline(cluster, PoolsLoad(size.requests))


def _both(label: str) -> dict[str, Column]:
    return {
        "planned": partial(_swept, label, False),
        "SIMULATED": partial(_swept, label, True),
    }


def _sim(known: Mapping[str, Preset], policy: str, name: str, size: Size) -> float:
    return simulated(known[name], policy, size)


def _sim_gain(known: Mapping[str, Preset], policy: str, name: str, size: Size) -> float:
    return gain(known[name], policy, size)


TARGETS: Mapping[str, Target] = {
    "fig8-left": Target(
        title="Acceptance rate at 4x compaction: planned is the geometric curve "
        "through the paper's two points",
        x="draft length, tokens",
        y="accepted / drafted",
        points=(5, 10, 15, 20, 25, 30, 40, 50),
        columns={
            "paper, Llama-70B": printed({30: 23 / 30}),
            "paper, Qwen-32B": printed({30: 19 / 30}),
            "planned, Llama-70B": partial(_acceptance_rate, PUBLISHED_LLAMA_70B),
            "planned, Qwen-32B": partial(_acceptance_rate, PUBLISHED_QWEN_32B),
        },
    ),
    "fig8-right": Target(
        title="Ideal speedup at 4x compaction, Llama-70B on 2x H100 NVL",
        x="draft length, tokens",
        y="throughput / full KV's",
        points=(5, 10, 15, 20, 25, 30, 40, 50),
        columns={
            "paper": printed({15: 3.7}),
            "planned": _ideal,
            "SIMULATED": lambda length, size: gain(
                LLAMA_70B, "hybrid", size, keep=0.25, draft_length=length
            ),
        },
    ),
    "fig11-left": Target(
        title="Long-context decoding",
        x="model",
        y="tokens/s",
        points=tuple(MODELS),
        columns={
            "paper, full KV": printed({"Llama-70B": 102}),
            "paper, VeriCache": printed({"Llama-70B": 256}),
            "planned, full KV": partial(_planned, MODELS, False),
            "planned, VeriCache": partial(_planned, MODELS, True),
            "SIMULATED, full KV": partial(_sim, MODELS, "full-kv"),
            "SIMULATED, VeriCache": partial(_sim, MODELS, "hybrid"),
            "SIMULATED, lock-step": partial(_sim, MODELS, "lock-step"),
        },
    ),
    "fig13-left-budget": Target(
        title="KV budget: models of growing weights on one RTX PRO 6000 (the paper's "
        "0.74 to 0.2 of HBM)",
        x="model",
        y="throughput / full KV's",
        points=tuple(BUDGETS),
        columns={
            "paper, VeriCache": printed({"Qwen-8B": 1.61, "Qwen-32B": 2.71}),
            "paper, SparseSpec": printed({"Qwen-8B": 1.82, "Qwen-32B": 1.02}),
            "planned, VeriCache": _ratio(
                partial(_planned, BUDGETS, True), partial(_planned, BUDGETS, False)
            ),
            "planned, SparseSpec": _planned_sparse,
            "SIMULATED, VeriCache": partial(_sim_gain, BUDGETS, "hybrid"),
            "SIMULATED, SparseSpec": partial(_sim_gain, BUDGETS, "sparse-resident"),
        },
    ),
    "fig13-left-link": Target(
        title="HBM over link: Qwen-32B on an H100 NVL with other links (the paper's "
        "ends are an H100 NVL and a GH200, its model is not given)",
        x="HBM bandwidth / link bandwidth",
        y="throughput / full KV's",
        points=(60, 50, 40, 30, 20, 10),
        columns={
            "paper": printed({60: 1.92, 10: 3.01}),
            "planned": _planned_link,
            "SIMULATED": _simulated_link,
        },
    ),
    "fig13-right-instances": Target(
        title="Remote instances for one local one; Mistral-24B, over the best mix of "
        "plain paths (the paper's text: best at 4)",
        x="G_R / G_L",
        y="throughput / B1 and B2's",
        points=SWEEPS["G_R / G_L"][1],
        columns=_both("G_R / G_L"),
    ),
    "fig13-right-arrival": Target(
        title="Arrival of full KV at a remote instance in draft-verify cycles of a "
        "full batch; Mistral-24B (the paper's text: pays up to about 5)",
        x="T_init_remote / T_decode",
        y="throughput / B1 and B2's",
        points=SWEEPS["T_init_remote / T_decode"][1],
        columns=_both("T_init_remote / T_decode"),
    ),
}
"""By the name of ``--figures``."""


def page(report: Mapping[str, Any]) -> str:
    """Return the tables of all figures as Markdown."""
    parts = [
        "# The paper's figures, one table each",
        f"Written by `{report['provenance']['command']}`. Planned: the paper's "
        "equations with the assumptions of "
        "[paper_vs_ours.md](paper_vs_ours.md). Columns that say so are "
        f"{LABEL} A dash: not in the paper's text. Nothing here is a measurement; "
        "[results](../../docs/results.md) are.",
        "Where only two or three full KVs fit (Llama-70B), the staging buffer, which "
        "takes a whole residual KV, takes the place of requests, and the simulated "
        "server is slower than full KV unless drafts are long: the paper's equations "
        "count the staging that is in use on average.",
    ]
    for row in report["rows"]:
        target = TARGETS[row["name"]]
        head = [target.x, *target.columns]
        lines = [head, ["---"] * len(head)]
        lines += [
            [str(point), *(_cell(row["columns"][name][i]) for name in target.columns)]
            for i, point in enumerate(target.points)
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"## {row['name']}\n\n{target.title}; {target.y}.\n\n{table}")
    left = "\n".join(f"- {name}: {why}." for name, why in LEFT_OUT.items())
    parts.append(f"## Left out\n\n{left}")
    return "\n\n".join(parts) + "\n"


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write one SVG with a plot for each figure.

    Raises:
        ConfigError: matplotlib is missing, or ``path`` cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = report["rows"]
    down = -(-len(rows) // 2)
    figure = Figure(figsize=(13, 4.4 * down), layout="constrained")
    for axis, row in zip(
        figure.subplots(down, 2, squeeze=False).flatten(), rows, strict=False
    ):
        target = TARGETS[row["name"]]
        named = isinstance(target.points[0], str)
        places = range(len(target.points)) if named else target.points
        for i, (name, values) in enumerate(row["columns"].items()):
            pairs = zip(places, values, strict=True)
            shown = [(x, y) for x, y in pairs if y is not None]
            style = "*" if name.startswith("paper") else ".-"
            size = 12 if style == "*" else 6
            axis.plot(*zip(*shown, strict=True), style, ms=size, c=f"C{i}", label=name)
        if named:
            axis.set_xticks(list(places), target.points)
        axis.set(title=row["name"], xlabel=target.x, ylabel=target.y)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in figure.axes[len(rows) :]:
        axis.remove()
    save_svg(figure, path)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _compute(target: Target, size: Size) -> dict[str, Any]:
    columns = {
        name: [column(point, size) for point in target.points]
        for name, column in target.columns.items()
    }
    return {"title": target.title, "points": list(target.points), "columns": columns}


def _measure(options: argparse.Namespace, results: Results) -> None:
    names = list(TARGETS) if options.figures == ["all"] else options.figures
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        left = [f"{name}: {why}" for name, why in LEFT_OUT.items()]
        raise ConfigError(
            f"--figures {unknown[0]}; known: all, {', '.join(TARGETS)}. Left out: "
            f"{'; '.join(left)}"
        )
    if options.requests < 4 or options.tokens < 1:
        raise ConfigError("--requests must be >= 4 and --tokens >= 1")
    size = Size(options.requests, options.tokens)
    for name in names:
        results.row(name, _compute, TARGETS[name], size)
    if options.out is not None:
        draw(results.write(), options.out.with_suffix(".svg"))


FIGURES = Benchmark(
    about="The paper's figures by name: as printed, planned by its equations and "
    "simulated by this scheduler on modelled hardware; nothing is measured.",
    options={
        "figures": (["all"], f"all, or of {', '.join(TARGETS)}"),
        "requests": (80, "of each simulated run"),
        "tokens": (512, "of each simulated answer"),
    },
    measure=_measure,
    page=page,
    selecting=("figures",),
)
