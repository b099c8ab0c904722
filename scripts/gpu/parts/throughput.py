"""Decode tokens per second of VeriCache and of plain SGLang, everything on one device.

Weights are random, so acceptance is simulated, and everything written says so. The
measuring is ``vericache_sglang.evaluation``'s: prompts are cached before the clock
starts, and the first pass of each server warms it.
"""

from __future__ import annotations

import json
import shlex
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu.check import ROOT, Check, backend_flags, shared_flags

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gpu.check import Context
    from gpu.job import Job

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
    from vericache_sglang.evaluation.experiment import Experiment
    from vericache_sglang.evaluation.fleet import Fleet
    from vericache_sglang.evaluation.options import check, draw_requests, parser
    from vericache_sglang.evaluation.server import ServerError

    context, folder = job.context, job.results.folder
    model = DEMO if context.on_cpu else random_model(folder / MODEL)
    figures = job.figures = {"points": {}, "rows": []}
    fleet = None
    for load in LOADS[context.device]:
        options = parser().parse_args(words(context, folder, model, name, load))
        systems = check(options)
        fleet = fleet or Fleet(options)
        run = Experiment(options, systems, draw_requests(options), fleet)
        run.run()
        found = run.results()[name]
        if wrong := found["skipped"] or "; ".join(found["errors"]):
            raise ServerError(wrong)
        job.attention = fleet.ready(systems[0])[0].info()["attention_backend"]
        key = "{} x {} + {}".format(*load)
        figures["points"][key] = found
        plain = (job.found(PLAIN, "points") or {}).get(key)
        base = (plain or found)["rounds"][0] if plain or name == PLAIN else None
        figures["rows"].append({"load": key} | cells(found["rounds"][0], base))


def cells(ours: Mapping[str, Any], plain: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what the table says of a load.

    Args:
        ours: Figures of a pass; see ``vericache_sglang.evaluation.figures``.
        plain: Plain SGLang's; None before they were measured.
    """
    rate, base = (one and one["decode_tokens_per_s"] for one in (ours, plain))
    accepted, counted = ours["accepted_per_verify"], ours["counters"]
    rows = [counted.get(f"{kind}_rows", 0) for kind in ("plain", "draft", "verify")]
    return {
        "decode tokens/s": f"{rate:.0f}" if rate else "-",
        "x plain": f"{rate / base:.2f}" if rate and base else "-",
        "tokens/s": f"{ours['tokens_per_s']:.0f}",
        "accepted a cycle": "-" if accepted is None else f"{accepted:.1f}",
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
        *("--output", output, "--repeats", "1", "--prefill", "cached"),
        *("--timeout", "240"),
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
