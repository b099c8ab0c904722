"""Recommend settings and count memory: ``python -m vericache_sglang.plan --help``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vericache_sglang.config.cli import add_flags, given_values
from vericache_sglang.config.files import load_config, to_yaml
from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.errors import ConfigError, VeriCacheError
from vericache_sglang.planning.acceptance import AcceptanceCurve, Geometric, MissByKeep
from vericache_sglang.planning.break_even import table
from vericache_sglang.planning.hardware import GPUS, gpu_named, machine_of
from vericache_sglang.planning.memory import (
    ledger,
    memory_overview,
    memory_table,
    shortage,
)
from vericache_sglang.planning.models import CATALOGUE, find_model
from vericache_sglang.planning.paper.report import all_claims, page
from vericache_sglang.planning.plot import Curve, lengths_figure, save, sweeps_figure
from vericache_sglang.planning.pools import (
    COMPRESSED,
    add_pool_flags,
    cluster_of,
    pools_summary,
    sweeps,
)
from vericache_sglang.planning.recommend import (
    DEFAULT_ACCEPTANCE,
    KEEPS,
    ExpectedWorkload,
    Recommendation,
    recommend,
    speedup_curve,
)
from vericache_sglang.planning.summary import summary

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan or the paper's table; returns the exit status.

    Args:
        argv: Command-line arguments; None takes the process's own.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not args.memory:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if args.memory:
            alone = args.model is args.gpu is None and not rest
            text = (_audited() if alone else _memory(args, rest)) + "\n"
        elif args.drafters:
            text = table() + "\n"
        else:
            plan = _remote if args.remote else _plan
            text = page(all_claims()) if args.paper else plan(args) + "\n"
        print(text, end="")
    except VeriCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vericache_sglang.plan",
        description="Arithmetic, not a measurement: settings and expected speedup.",
        epilog="With --memory every flag of the launcher may follow; those of "
        "VeriCache, and those of SGLang that decide tensor sizes, are looked at.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    models = ", ".join(CATALOGUE)
    add("--model", metavar="DIR|NAME", help=f"folder with a config.json, or {models}")
    add("--gpu", metavar="NAME|GIB", help=", ".join(GPUS) + "; with --memory also GiB")
    add("--devices", type=int, default=1, metavar="N", help="GPUs of one server")
    add("--context", type=int, metavar="N", help="prompt length, in tokens")
    add("--output", type=int, metavar="N", help="answer length, in tokens")
    add("--concurrency", type=int, metavar="N", help="most requests at once")
    add("--keep", type=float, nargs="+", metavar="C", help="keep shares to try")
    add(
        "--accept",
        type=float,
        metavar="P",
        help="probability that a draft is accepted, at the one --keep, else at 0.25",
    )
    add("--datasheet", action="store_true", help="datasheet rates, not measured ones")
    add("--save", type=Path, metavar="YAML", help="write the settings to this file")
    add("--plot", type=Path, metavar="PNG", help="draw speedup over draft length")
    add_pool_flags(
        parser,
        "plan remote prefixes instead: L instances near the store, R behind a slow "
        "link; the best mix of the paper's six paths, both sweeps of figure 13",
    )
    add("--draft-length", type=int, default=40, metavar="N", help="with --remote")
    add("--paper", action="store_true", help="print the paper's figures beside ours")
    add(
        "--drafters",
        action="store_true",
        help="print the acceptance from which inner drafters pay",
    )
    add(
        "--memory",
        action="store_true",
        help="print every tensor on a GPU instead; alone, of some deployments",
    )
    return parser


def _require(args: argparse.Namespace, *names: str) -> None:
    missing = [f"--{name}" for name in names if getattr(args, name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be given (or --paper alone)")


def _memory(args: argparse.Namespace, rest: list[str]) -> str:
    """Return the memory ledger of the launcher's flags ``rest``."""
    # Compressors are torch's; the rest of this command does without it.
    from vericache_sglang.runtime.planned_memory import add_memory_flags, planned

    _require(args, "model", "gpu")
    parser = argparse.ArgumentParser(prog="plan --memory", allow_abbrev=False)
    parser.add_argument("--vericache-config", type=Path)
    add_flags(parser)
    add_memory_flags(parser)
    flags, others = parser.parse_known_args(rest)
    if flags.tp_size is None and args.devices > 1:
        flags.tp_size = args.devices
    if flags.context_length is None:
        flags.context_length = args.context
    config = load_config(flags.vericache_config, given_values(flags))
    gib = args.gpu.replace(".", "", 1)
    known = None if gib.isdecimal() else gpu_named(args.gpu)
    found = ledger(
        planned(
            find_model(args.model),
            config,
            known.memory_mib if known else float(args.gpu) * 1024,
            known.capability if known else None,
            vars(flags),
        )
    )
    notes = [memory_table(found)]
    if others:
        notes.append(f"Not looked at: {' '.join(others)}")
    short = shortage(found)
    if short:
        notes.append(f"Too small: {short}")
    return "\n\n".join(notes)


def _audited() -> str:
    """Return the memory of the audited deployments, side by side."""
    from vericache_sglang.runtime.planned_memory import AUDITED, planned

    found = {}
    for name, gpu, flags in AUDITED:
        model, known = find_model(name), GPUS[gpu]
        given = (known.memory_mib, known.capability, flags)
        found[f"{name}, {gpu}"] = ledger(planned(model, VeriCacheConfig(), *given))
    return memory_overview(found)


def _plan(args: argparse.Namespace) -> str:
    _require(args, "model", "gpu", "context", "output")
    model = find_model(args.model)
    machine = machine_of(gpu_named(args.gpu), args.devices, datasheet=args.datasheet)
    workload = ExpectedWorkload(
        context_tokens=args.context,
        output_tokens=args.output,
        concurrency=args.concurrency,
    )
    keeps = _keeps(args.keep)
    acceptance, assumed = _acceptance(args.accept, keeps)
    result = recommend(model, machine, workload, acceptance=acceptance, keeps=keeps)
    notes = [summary(result, model, machine, workload), f"Assumed: {assumed}"]
    if args.plot is not None:
        shown = sorted({keeps[0], result.keep, keeps[-1]})
        curves = [
            Curve(
                f"keep {keep:g}",
                speedup_curve(model, machine, workload, keep, acceptance),
            )
            for keep in shown
        ]
        save(lengths_figure(curves, f"{model.name} on {machine.name}"), args.plot)
        notes.append(f"Drawn: {args.plot}")
    if args.save is not None:
        _save(result, args.save)
        notes.append(f"Saved: {args.save}")
    return "\n".join(notes)


def _remote(args: argparse.Namespace) -> str:
    _require(args, "model", "gpu", "context", "output")
    model = find_model(args.model)
    (keep, *_) = _keeps(args.keep or [COMPRESSED])
    machine = machine_of(gpu_named(args.gpu), args.devices, datasheet=args.datasheet)
    cluster = cluster_of(args, model, machine, context=args.context, compressed=keep)
    found = sweeps(cluster)
    notes = [pools_summary(model.name, cluster, found), ""]
    accepted = cluster.acceptance_rate * cluster.draft_length
    notes.append(f"Assumed: {accepted:.1f} of {cluster.draft_length} drafts accepted")
    notes.append("Arithmetic only; SIMULATED by simulate --remote")
    if args.plot is not None:
        title = f"{model.name} on {cluster.machine.name}"
        save(sweeps_figure({"planned": found}, title), args.plot)
        notes.append(f"Drawn: {args.plot}")
    return "\n".join(notes)


def _keeps(given: list[float] | None) -> tuple[float, ...]:
    if given is None:
        return KEEPS
    if not all(0 < keep <= 1 for keep in given):
        raise ConfigError(f"--keep must be > 0 and <= 1, got {given}")
    return tuple(given)


def _acceptance(
    survival: float | None, keeps: tuple[float, ...]
) -> tuple[AcceptanceCurve, str]:
    carried = "carried to other keep shares as (1 - c) / c"
    if survival is None:
        published = f"p = {DEFAULT_ACCEPTANCE.survival:.3f}, 19 of 30 drafts"
        return DEFAULT_ACCEPTANCE, (
            f"acceptance of Qwen-32B with KVzip at keep 0.25 ({published}), "
            f"{carried}; measure your own and give --accept"
        )
    if len(keeps) == 1:
        return Geometric(survival), f"each draft is accepted with p = {survival:g}"
    return MissByKeep(survival), f"p = {survival:g} at keep 0.25, {carried}"


def _save(result: Recommendation, path: Path) -> None:
    if result.config is None:
        raise ConfigError("--save: nothing to save, plain serving is recommended")
    try:
        path.write_text(to_yaml(result.config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save: {path} cannot be written: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
