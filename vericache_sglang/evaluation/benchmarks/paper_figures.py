"""The paper's figures by name (arXiv:2605.17613).

As printed, planned by its equations, simulated on modelled hardware, and measured on
the demo models or on ``--model``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.benchmark import Benchmark
from vericache_sglang.evaluation.benchmarks.divergence import FULL
from vericache_sglang.evaluation.benchmarks.figure_columns import (
    BUDGETS,
    LLAMA_70B,
    MODELS,
    Size,
    composed,
    gain,
    ideal,
    planned,
    planned_link,
    planned_rate,
    planned_sparse,
    printed,
    quotient,
    remote_rate,
    sim,
    sim_gain,
    simulated_link,
    swept,
)
from vericache_sglang.evaluation.benchmarks.figure_systems import (
    CALLS,
    CHAIN,
    EXTRAS,
    FORCED,
    FOURFOLD,
    LENGTHS,
    LISTS,
    LONG_DRAFTS,
    RATES,
    MeasuredColumn,
    acceptance_rate,
    accepted,
    accumulated,
    latency,
    likeness,
    measure_rows,
    proposals,
    ratio,
    score,
    throughput,
)
from vericache_sglang.evaluation.benchmarks.pipeline1 import AGAIN, SERVED
from vericache_sglang.evaluation.figure_page import draw, page
from vericache_sglang.evaluation.picture import require_matplotlib
from vericache_sglang.planning.acceptance import (
    PUBLISHED_LLAMA_70B,
    PUBLISHED_QWEN_32B,
)
from vericache_sglang.planning.pools import SWEEPS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.benchmarks.figure_columns import Column
    from vericache_sglang.evaluation.benchmarks.figure_systems import SystemGroup

LEFT_OUT = {
    "fig1": "a sketch, of what fig14 and fig16 measure",
    "fig2": "one code-generation failure over 280,000 characters: no model here writes "
    "code",
    "fig3, left": "SWE-bench Lite, with that model",
    "fig5, fig6, fig7": "drawings without data",
    "fig12, fig14 and fig15, bottom": "pipeline 2 needs five machines; "
    "`bench remote` measures its paths on one",
    "fig13, measured": "`bench sweep --links` emulates a link, `bench pipeline1 "
    "--pools` shrinks the KV budget; there is one machine here",
}
"""The paper's other figures, and why they are not targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One figure of the paper.

    Attributes:
        title: What it shows, with what is assumed beyond the shared assumptions.
        x: Label of the x axis.
        y: Label of the y axis.
        points: Values of the x axis, numbers or names.
        columns: Name -> column; a name begins with paper, planned or SIMULATED.
        measured: The same of what servers are started for; names begin with MEASURED.
        across: The measured column that is the x axis of the plot; "": the points are.
    """

    title: str
    x: str
    y: str
    points: tuple[Any, ...]
    columns: Mapping[str, Column] = field(default_factory=dict)
    measured: Mapping[str, MeasuredColumn] = field(default_factory=dict)
    across: str = ""


OURS = "measured here"
"""The point of measured columns where the others are models of the paper."""

KEPT = {share: CALLS.of(f"lossy kvzip, keep {share:g}") for share in (0.25, 0.5, 0.75)}


def _rows(group: SystemGroup, *systems: str) -> dict[str, str]:
    """Return system -> the name of its row, as points of a figure."""
    return {system: group.of(system) for system in systems}


LOSSY_SWEEP = (
    *(f"lossy kvzip, keep {share:g}" for share in (0.25, 0.5, 0.75)),
    *(f"lossy kivi, {bits} bit" for bits in (8, 4, 2)),
)
FRONTIER = _rows(CALLS, FULL, AGAIN, "VeriCache", *LOSSY_SWEEP)
LONG_FRONTIER = _rows(LISTS, FULL, AGAIN, "VeriCache", *LOSSY_SWEEP)
EXTRA_FRONTIER = _rows(
    CALLS,
    *(f"VeriCache over {name}" for name in EXTRAS),
    *(f"lossy {name}" for name in EXTRAS),
)
SPEED = "MEASURED, tokens/s / full KV's"


def _over(rows: Mapping[str, str], y: str, value: Any) -> dict[str, MeasuredColumn]:
    """Return the columns of a quality over throughput, a mark a system."""
    return {
        SPEED: MeasuredColumn(rows, ratio),
        f"MEASURED, {y}": MeasuredColumn(rows, value),
    }


DRAFTS = {x: LONG_DRAFTS.of(f"VeriCache, drafts of {x}") for x in LENGTHS}
COMPOSED = {
    "EAGLE3": FORCED.of("EAGLE3"),
    "VeriCache": FORCED.of(f"VeriCache, drafts of {LENGTHS[-1]}"),
    "VeriCache + EAGLE3": FORCED.of("VeriCache + EAGLE3"),
}
SERVED_SYSTEMS = {
    "full KV": FULL,
    "VeriCache": "VeriCache",
    "EAGLE3": "EAGLE3 alone",
    "VeriCache + EAGLE3": "VeriCache + EAGLE3",
    "SparseSpec": "as SparseSpec",
}
"""Names in figures 11 and 12 -> systems."""

SERVED_COMPOSED = {
    name: CALLS.of(SERVED_SYSTEMS[name])
    for name in ("EAGLE3", "VeriCache", "VeriCache + EAGLE3")
}
KL = likeness("lmcache-trace", "kl_per_step")

TARGETS: Mapping[str, Target] = {
    "fig3": Target(
        title="Soft metrics mask functional failures (right half): twins of "
        "ComplexFuncBench, the KVzip KV alone",
        x="share of tokens kept",
        y="score of answers",
        points=tuple(KEPT),
        columns={"paper, calls (below)": printed({0.25: 0.1})},
        measured={
            "MEASURED, word F1": MeasuredColumn(
                KEPT, likeness("complex-func-bench", "word_f1")
            ),
            "MEASURED, right calls": MeasuredColumn(
                KEPT, score("complex-func-bench", "call accuracy")
            ),
        },
    ),
    "fig4": Target(
        title="KL of sequences from full KV at temperature 0.5, KVzip at 0.25 and "
        "TurboQuant (the paper's keys 4 and values 3 bit, here 2 bit, which show on "
        "the demo model); answers of the demo model end after about 50 tokens",
        x="decoded token t",
        y="KL_1:t, nats",
        points=(5, 10, 20, 30, 40, 50, 250),
        columns={"paper, KVzip": printed({250: 6.0})},
        measured={
            "MEASURED, KVzip": MeasuredColumn(
                KEPT[FOURFOLD], accumulated("lmcache-trace")
            ),
            "MEASURED, TurboQuant": MeasuredColumn(
                CALLS.of("lossy turboquant, 2 bit"), accumulated("lmcache-trace")
            ),
            "MEASURED, VeriCache": MeasuredColumn(
                CALLS.of("VeriCache"), accumulated("lmcache-trace")
            ),
        },
    ),
    "fig8-left": Target(
        title="Acceptance rate at 4x compaction: planned is the geometric curve "
        "through the paper's two points",
        x="draft length, tokens",
        y="accepted / drafted",
        points=(5, 10, 15, 20, 25, 30, 40, 50),
        columns={
            "paper, Llama-70B": printed({30: 23 / 30}),
            "paper, Qwen-32B": printed({30: 19 / 30}),
            "planned, Llama-70B": partial(planned_rate, PUBLISHED_LLAMA_70B),
            "planned, Qwen-32B": partial(planned_rate, PUBLISHED_QWEN_32B),
        },
        measured={"MEASURED": MeasuredColumn(DRAFTS, acceptance_rate)},
    ),
    "fig8-right": Target(
        title="Ideal speedup at 4x compaction, Llama-70B on 2x H100 NVL",
        x="draft length, tokens",
        y="throughput / full KV's",
        points=(5, 10, 15, 20, 25, 30, 40, 50),
        columns={
            "paper": printed({15: 3.7}),
            "planned": ideal,
            "SIMULATED": lambda length, size: gain(
                LLAMA_70B, "hybrid", size, keep=0.25, draft_length=length
            ),
        },
        measured={"MEASURED": MeasuredColumn(DRAFTS, ratio)},
    ),
    "fig9": Target(
        title="Acceptance length, VeriCache at 4x compaction beside Eagle and a small "
        "model; answers of the demo model end after about 50 tokens",
        x="draft length, tokens",
        y="drafts accepted per verification",
        points=(CHAIN, *LENGTHS),
        columns={
            "paper, VeriCache, Llama-70B": printed({30: 23}),
            "paper, VeriCache, Qwen-32B": printed({30: 19}),
            "paper, Eagle (1 to 2)": printed({30: 1.5}),
            "paper, small model, Llama-70B": printed({30: 10}),
            "paper, small model, Qwen-32B": printed({30: 3}),
        },
        measured={
            "MEASURED, VeriCache": MeasuredColumn(
                {x: FORCED.of(f"VeriCache, drafts of {x}") for x in LENGTHS}, accepted
            ),
            "MEASURED, EAGLE3 head": MeasuredColumn(
                {CHAIN: FORCED.of("EAGLE3")}, proposals
            ),
            "MEASURED, small model": MeasuredColumn(
                {CHAIN: FORCED.of("small model")}, proposals
            ),
        },
    ),
    "fig10-left": Target(
        title="Composing VeriCache with Eagle: drafts of 30 accepted (no values in the "
        f"paper's text), chains of {CHAIN}",
        x="system",
        y="accepted tokens",
        points=("EAGLE3", "VeriCache", "VeriCache + EAGLE3"),
        measured={
            "MEASURED, drafts a verification": MeasuredColumn(COMPOSED, accepted),
            "MEASURED, proposals a row": MeasuredColumn(COMPOSED, proposals),
        },
    ),
    "fig10-right": Target(
        title="Composing VeriCache with Eagle: ideal speedup; planned: Qwen3-32B, "
        "proposals accepted with 0.5; measured: no ideal, as served",
        x="system",
        y="throughput / full KV's",
        points=("EAGLE3", "VeriCache", "VeriCache + EAGLE3"),
        columns={
            "paper": printed(
                {"EAGLE3": 1.78, "VeriCache": 3.5, "VeriCache + EAGLE3": 4.35}
            ),
            "planned": composed,
        },
        measured={"MEASURED": MeasuredColumn(SERVED_COMPOSED, ratio)},
    ),
    "fig11-left": Target(
        title="Long-context decoding",
        x="model",
        y="tokens/s",
        points=(*MODELS, OURS),
        columns={
            "paper, full KV": printed({"Llama-70B": 102}),
            "paper, VeriCache": printed({"Llama-70B": 256}),
            "planned, full KV": partial(planned, MODELS, False),
            "planned, VeriCache": partial(planned, MODELS, True),
            "SIMULATED, full KV": partial(sim, MODELS, "full-kv"),
            "SIMULATED, VeriCache": partial(sim, MODELS, "hybrid"),
            "SIMULATED, lock-step": partial(sim, MODELS, "lock-step"),
        },
        measured={
            f"MEASURED, {system}": MeasuredColumn({OURS: CALLS.of(row)}, throughput)
            for system, row in SERVED_SYSTEMS.items()
        },
    ),
    "fig11-right": Target(
        title="Remote prefix caching, one local and four remote instances; nothing "
        "measured: there is one machine here",
        x="model",
        y="tokens/s",
        points=tuple(MODELS),
        columns={
            "paper, full KV": printed({"Llama-70B": 240}),
            "paper, VeriCache": printed({"Llama-70B": 485}),
            "planned, full KV": partial(remote_rate, False),
            "planned, VeriCache": partial(remote_rate, True),
        },
    ),
    "fig12": Target(
        title="Latency over request rate, Poisson arrivals, pipeline 1 (no values in "
        "the paper's text)",
        x="requests/s",
        y="median latency of an answer, s",
        points=RATES,
        measured={
            f"MEASURED, {system}": MeasuredColumn(CALLS.of(row), latency)
            for system, row in SERVED_SYSTEMS.items()
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
            "planned, VeriCache": quotient(
                partial(planned, BUDGETS, True), partial(planned, BUDGETS, False)
            ),
            "planned, SparseSpec": planned_sparse,
            "SIMULATED, VeriCache": partial(sim_gain, BUDGETS, "hybrid"),
            "SIMULATED, SparseSpec": partial(sim_gain, BUDGETS, "sparse-resident"),
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
            "planned": planned_link,
            "SIMULATED": simulated_link,
        },
    ),
    "fig13-right-instances": Target(
        title="Remote instances for one local one; Mistral-24B, over the best mix of "
        "plain paths (the paper's text: best at 4)",
        x="G_R / G_L",
        y="throughput / B1 and B2's",
        points=SWEEPS["G_R / G_L"][1],
        columns={
            "planned": partial(swept, "G_R / G_L", False),
            "SIMULATED": partial(swept, "G_R / G_L", True),
        },
    ),
    "fig13-right-arrival": Target(
        title="Arrival of full KV at a remote instance in draft-verify cycles of a "
        "full batch; Mistral-24B (the paper's text: pays up to about 5)",
        x="T_init_remote / T_decode",
        y="throughput / B1 and B2's",
        points=SWEEPS["T_init_remote / T_decode"][1],
        columns={
            "planned": partial(swept, "T_init_remote / T_decode", False),
            "SIMULATED": partial(swept, "T_init_remote / T_decode", True),
        },
    ),
    "fig14": Target(
        title="Distance from full KV over throughput, pipeline 1, twins of "
        "LMCache-trace (the paper: VeriCache below 0.01 nats at up to 3.82x, KVzip 0.5 "
        "14.4 nats a request)",
        x="system",
        y="KL a step, nats",
        points=tuple(FRONTIER),
        columns={"paper, up to": printed({"VeriCache": 3.82})},
        measured=_over(FRONTIER, "KL a step, nats", KL),
        across=SPEED,
    ),
    "fig15": Target(
        title="Further compressors (the paper: VeriCache over them 1.4x to 1.9x on "
        "Mistral-24B)",
        x="system",
        y="KL a step, nats",
        points=tuple(EXTRA_FRONTIER),
        measured=_over(EXTRA_FRONTIER, "KL a step, nats", KL),
        across=SPEED,
    ),
    "fig16-calls": Target(
        title="Function calls over throughput, twins of ComplexFuncBench (the paper: "
        "at least 59 % of the fastest KVzip's throughput at full accuracy)",
        x="system",
        y="right calls",
        points=tuple(FRONTIER),
        measured=_over(
            FRONTIER, "right calls", score("complex-func-bench", "call accuracy")
        ),
        across=SPEED,
    ),
    "fig16-defense": Target(
        title="Prompt injection over throughput, twins of PISanitizer. The demo model "
        "follows no hidden instruction, so utility (the right call in spite of one) "
        "stands for the defense rate",
        x="system",
        y="utility",
        points=tuple(FRONTIER),
        measured=_over(FRONTIER, "utility", score("pisanitizer", "utility")),
        across=SPEED,
    ),
    "fig17-completion": Target(
        title="Long generation over throughput, twins of LongGenBench (the paper: all "
        "completed at 339 tokens/s)",
        x="system",
        y="completion rate",
        points=tuple(LONG_FRONTIER),
        measured=_over(
            LONG_FRONTIER, "completion rate", score("long-gen-bench", "completion rate")
        ),
        across=SPEED,
    ),
    "fig17-accuracy": Target(
        title="Long generation over throughput, twins of GSM8K-Long (the paper: 90 % "
        "accuracy at 385 tokens/s)",
        x="system",
        y="exact answers",
        points=tuple(LONG_FRONTIER),
        measured=_over(LONG_FRONTIER, "exact answers", score("gsm8k-long", "exact")),
        across=SPEED,
    ),
}
"""By the name of ``--figures``."""


def _compute(
    target: Target, size: Size, rows: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    columns = {
        name: [column(point, size) for point in target.points]
        for name, column in target.columns.items()
    }
    failed = [
        name
        for reading in target.measured.values()
        for name in reading.rows
        if "error" in rows.get(name, {})
    ]
    if rows:
        columns |= {
            name: [reading.at(point, rows) for point in target.points]
            for name, reading in target.measured.items()
        }
    # A row with an error is computed again by --resume, as its systems are measured.
    errors = {"error": f"{failed[0]} failed"} if failed else {}
    axes = {name: getattr(target, name) for name in ("title", "x", "y")}
    across = target.across if rows else ""
    return {
        **axes,
        "across": across,
        "points": list(target.points),
        "columns": columns,
        **errors,
    }


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
    if options.out is not None:
        require_matplotlib()
    results.figures["left_out"] = dict(LEFT_OUT)
    size = Size(options.requests, options.tokens)
    if not options.planned_only:
        readings = [each for name in names for each in TARGETS[name].measured.values()]
        measure_rows([row for each in readings for row in each.rows], options, results)
    for name in names:
        target = TARGETS[name]
        if target.columns or not options.planned_only:
            rows = {} if options.planned_only else {**results.rows}
            results.row(name, _compute, target, size, rows)
    if options.out is not None:
        draw(results.write(), options.out.with_suffix(".svg"))


FIGURES = Benchmark(
    about="The paper's figures by name: as printed, planned by its equations, "
    "simulated by this scheduler on modelled hardware, and measured on the demo models "
    "or --model.",
    options={
        "figures": (["all"], f"all, or of {', '.join(TARGETS)}"),
        "requests": (80, "of each simulated run"),
        "tokens": (512, "of each simulated answer"),
        "planned-only": (False, "start no server: nothing is measured"),
        "model": (Path, "folder; unset: the demo model that can show a figure"),
        **{name: each for name, each in SERVED.items() if name != "rates"},
        "samples": (2, SERVED["samples"][1]),
        "output": (384, SERVED["output"][1]),
        "kl-tokens": (50, SERVED["kl-tokens"][1]),
        "repeats": (2, SERVED["repeats"][1]),
        "drafters": (["eagle3", "model"], SERVED["drafters"][1]),
    },
    measure=_measure,
    page=page,
    selecting=("figures",),
)
