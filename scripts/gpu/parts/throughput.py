"""Decode tokens per second of VeriCache and of plain SGLang, everything on one device.

Weights are random, so acceptance is simulated, and everything written says so. Prompts
are cached before the clock starts, and the first wave of each load warms the server.
"""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from gpu.check import ROOT, Check, backend_flags, shared_flags

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gpu.check import Context
    from gpu.job import Job
    from vericache_sglang.evaluation.server import Server

    Load = tuple[int, int, int]
    """Requests at once, tokens of a prompt, tokens of an answer."""

DEMO = ROOT / "configs" / "demo-model"

MODEL = "qwen3-8b"

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
"""What its config.json says otherwise than the demo model's, beside the shapes."""

ACCEPTANCE = 0.97
"""Of each draft; 20 of 32 are accepted then, as in arXiv:2605.17613."""

LOADS: Mapping[str, tuple[Load, ...]] = {
    "cuda": ((8, 32000, 320), (16, 32000, 320)),
    "cpu": ((2, 600, 24), (4, 600, 24)),
}

WAVES = 3
"""Of each load that count; one more goes before them."""

PLAIN = "plain"
SYSTEMS: Mapping[str, tuple[str, ...]] = {
    PLAIN: ("--disable-vericache",),
    "forced": ("--vericache-keep", "0.25", "--vericache-residency", "device"),
    "keep-quarter": ("--vericache-keep", "0.25"),
    "keep-eighth": ("--vericache-keep", "0.125"),
}
"""Flags by name; ``forced`` drafts even where the server would rather not."""

TOY = ("--vericache-min-prompt", "64", "--vericache-staging-tokens", "2048")
TOY += ("--vericache-host-gb", "0.5")
"""Flags of a rehearsal's servers that draft."""


def checks(context: Context) -> list[Check]:
    """Return the checks, the most important ones first."""
    model = "demo model" if context.on_cpu else f"random weights of {MODEL}'s shape"
    about = f"SIMULATED ACCEPTANCE, p = {ACCEPTANCE}; {model}"
    return [
        Check(name=name, about=about, run=partial(measured, name=name), seconds=420.0)
        for name in SYSTEMS
    ]


def measured(job: Job, *, name: str) -> None:
    """Measure one system at every load.

    Raises:
        ServerError: The server did not boot, or a request failed.
    """
    from vericache_sglang.evaluation.fleet import Fleet
    from vericache_sglang.evaluation.options import check, parser

    context, folder = job.context, job.results.folder
    model = DEMO if context.on_cpu else random_model(folder / MODEL)
    figures = job.figures = {"points": {}, "rows": []}
    fleet = None
    for load in LOADS[context.device]:
        options = parser().parse_args(words(context, folder, model, name, load))
        (system,) = check(options)
        fleet = fleet or Fleet(options)
        server, _ = fleet.ready(system)
        job.attention = server.info()["attention_backend"]
        key = "{} x {} + {}".format(*load)
        found = figures["points"][key] = waves(server, options)
        plain = (job.found(PLAIN, "points") or {}).get(key)
        base = plain or (found if name == PLAIN else None)
        figures["rows"].append({"load": key} | cells(found, base))


def waves(server: Server, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Answer all requests at once, some times over, their prompts cached before.

    Raises:
        ServerError: A request failed.
    """
    from vericache_sglang.evaluation.client import closed_loop
    from vericache_sglang.evaluation.figures import pass_figures
    from vericache_sglang.evaluation.options import draw_requests
    from vericache_sglang.evaluation.server import ServerError

    requests, found = draw_requests(options), []
    bodies = [request.body(ends=False) for request in requests]
    first = [replace(each, output_tokens=1).body(ends=False) for each in requests]
    for sent, clients in ((first, 1), *[(bodies, len(bodies))] * (1 + WAVES)):
        before = server.counters()
        done = closed_loop(server.url, sent, clients, lambda: None, options.timeout)
        one = pass_figures(done, before, server.counters(), options.memory_gbps)
        if one["errors"]:
            raise ServerError("; ".join(one["errors"]))
        found.append(one)
    return found[2:]


def cells(
    ours: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]] | None
) -> dict[str, str]:
    """Return what the table says of a load.

    Args:
        ours: Figures of its waves; see ``vericache_sglang.evaluation.figures``.
        plain: Plain SGLang's; None before they were measured.
    """

    def rates(waves: Sequence[Mapping[str, Any]], name: str) -> list[float]:
        return [wave[name] for wave in waves if wave[name]]

    decoding, whole = (rates(ours, f"{name}tokens_per_s") for name in ("decode_", ""))
    base = rates(plain or (), "decode_tokens_per_s")
    accepted = rates(ours, "accepted_per_verify")
    counted = [wave["counters"] for wave in ours]
    kinds = ("plain", "draft", "verify")
    rows = [sum(one.get(f"{kind}_rows", 0) for one in counted) for kind in kinds]
    return {
        "decode tokens/s": " ".join(f"{rate:.0f}" for rate in decoding) or "-",
        "x plain": f"{median(decoding) / median(base):.2f}"
        if decoding and base
        else "-",
        "tokens/s": f"{median(whole):.0f}",
        "accepted a cycle": f"{median(accepted):.1f}" if accepted else "-",
        "rows drafting": f"{1 - rows[0] / sum(rows):.0%}" if sum(rows) else "-",
    }


def words(
    context: Context, folder: Path, model: Path, name: str, load: Load
) -> list[str]:
    """Return the command line of ``vericache_sglang.bench`` for one system and load."""
    count, prompt, output = map(str, load)
    drafts = name != PLAIN
    flags = [*SYSTEMS[name], *backend_flags(context, drafts=drafts)]
    flags += TOY if drafts and context.on_cpu else ()
    engine = shared_flags(context)
    engine += [] if context.on_cpu else ["--load-format", "dummy"]
    return [
        *("--out", str(folder), "--model", str(model), "--random-prompts"),
        *("--systems", "", "--system", f"{name}={shlex.join(flags)}"),
        *(f"--engine={shlex.join(engine)}", "--simulated-acceptance", f"{ACCEPTANCE}"),
        *("--count", count, "--concurrency", count, "--context", prompt),
        *("--output", output, "--timeout", "240"),
    ]


def random_model(folder: Path) -> Path:
    """Write config and tokenizer of a model without weights; return its folder."""
    from vericache_sglang.planning.models import CATALOGUE

    without = shutil.ignore_patterns("*.safetensors", "kvzap*", "calibration")
    shutil.copytree(DEMO, folder, ignore=without, dirs_exist_ok=True)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    text = json.dumps({**config, **CONFIG, **CATALOGUE[MODEL]}, indent=1)
    file.write_text(text, encoding="utf-8")
    return folder
