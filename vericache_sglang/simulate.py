"""The command that compares scheduling policies on modelled hardware.

Everything printed and written is SIMULATED: the runtime the server uses decides, and a
roofline of the hardware says how long each forward and copy takes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.hardware import gpu_named, machine_of
from vericache_sglang.planning.models import find_model
from vericache_sglang.planning.plot import save, sweeps_figure
from vericache_sglang.planning.pools import add_pool_flags, cluster_of
from vericache_sglang.provenance import provenance
from vericache_sglang.simulation.policies import PLANES_ACCEPT, named, policies
from vericache_sglang.simulation.pools_report import (
    both_sweeps,
    pools_json,
    pools_page,
    simulated_rules,
)
from vericache_sglang.simulation.presets import PRESETS, costs_of
from vericache_sglang.simulation.remote import PoolsLoad
from vericache_sglang.simulation.report import LABEL, as_json, section, table
from vericache_sglang.simulation.server import SimulatedServer
from vericache_sglang.simulation.setup import Setup
from vericache_sglang.simulation.timeline import Timeline, draw
from vericache_sglang.simulation.workload import RequestMix, closed_loop, poisson, trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.simulation.presets import Preset
    from vericache_sglang.simulation.workload import Workload

WARM_SHARE = 0.25
"""Share of a closed loop's requests that finish before anything is measured."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if resources leak at the end, 2 for a wrong flag."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(words)
    try:
        origin = provenance(words, "python -m vericache_sglang.simulate")
        leaks = (_remote if options.remote else _compare)(options, origin)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for leak in leaks:
        print(f"FAILED: {leak}", file=sys.stderr)
    return 1 if leaks else 0


def _compare(options: argparse.Namespace, origin: dict[str, Any]) -> list[str]:
    """Simulate, print and write; return the resources leaked at the end."""
    command = origin["command"]
    presets = named(options.preset, PRESETS, "--preset")
    known = policies(options.keep, options.planes_accept)
    picked = list(named(options.policies, known, "--policies").values())
    setups = {name: _setup(options, preset) for name, preset in presets.items()}
    print(f"{LABEL}\n{command}", flush=True)
    pages, figures, leaks = [], {}, []
    timelines: dict[str, Timeline] = {}
    for name, setup in setups.items():
        results = []
        for policy in picked:
            timeline = Timeline() if options.plot else None
            results.append(SimulatedServer(setup, policy, timeline).run())
            if timeline is not None:
                timelines[f"{policy.name}, {name}"] = timeline
        print(f"\n{name}\n{table(results)}", flush=True)
        for row in results:
            held = {room: n for room, n in row.held.items() if n}
            leaks += [f"{name}, {row.policy}: held at the end: {held}"] if held else []
        assumptions = _assumptions(options, presets[name], setup)
        figures[name] = as_json(results, picked, assumptions)
        pages.append(section(name, results, assumptions))
    if options.json:
        whole = {"label": LABEL, "provenance": origin, "presets": figures}
        _write("--json", options.json, json.dumps(whole, indent=1) + "\n")
    if options.markdown:
        rows = "\n".join(f"- `{policy.name}`: {policy.summary}" for policy in picked)
        head = f"# Policies compared\n\n{LABEL}\n\n    {command}\n\n{rows}\n"
        _write("--markdown", options.markdown, "\n".join([head, *pages]))
    if options.plot:
        draw(timelines, Path(options.plot), options.plot_seconds)
    return leaks


def _remote(options: argparse.Namespace, origin: dict[str, Any]) -> list[str]:
    """Simulate two pools, print and write; return the slots held at the end."""
    (preset,) = named(options.preset, PRESETS, "--preset").values()
    cluster = cluster_of(
        options,
        find_model(preset.model),
        machine_of(gpu_named(preset.gpu), preset.devices),
        context=options.context[0],
        compressed=options.keep,
    )
    load = PoolsLoad(options.requests, options.concurrency or 0, options.seed)
    print(f"{LABEL}\n{origin['command']}\n", flush=True)
    results = simulated_rules(cluster, load)
    curves = both_sweeps(cluster, load) if options.sweep or options.plot else {}
    page = pools_page(cluster, results, curves)
    print(page, flush=True)
    if options.json:
        whole = {
            "label": LABEL,
            "provenance": origin,
            "pools": pools_json(cluster, results, curves),
        }
        _write("--json", options.json, json.dumps(whole, indent=1) + "\n")
    if options.markdown:
        command = origin["command"]
        head = f"# Two pools around a store\n\n{LABEL}\n\n    {command}\n\n"
        _write("--markdown", options.markdown, f"{head}{page}\n")
    if options.plot:
        title = f"SIMULATED and planned: {preset.model} on {cluster.machine.name}"
        save(sweeps_figure(curves, title), Path(options.plot))
    return [f"{row.rules}: {row.held} slots held" for row in results if row.held]


def _setup(options: argparse.Namespace, preset: Preset) -> Setup:
    accept = preset.accept if options.accept is None else options.accept
    return Setup(
        costs=costs_of(preset, options.link, options.overhead_ms / 1e3),
        workload=_workload(options, accept),
        draft_length=options.draft_length,
        max_verifies=options.max_verifies,
        host_bytes=options.host_gb * 1e9,
        precomputed=not options.prefill,
        reserve=options.reserve,
        staged_residuals=options.staged,
        proposals=options.inner_length or 0,
        proposal_accept=options.inner_accept or 0.0,
        seed=options.seed,
    )


def _assumptions(
    options: argparse.Namespace, preset: Preset, setup: Setup
) -> dict[str, object]:
    flags = {key: value for key, value in vars(options).items() if value is not None}
    for name in ("preset", "policies", "json", "markdown", "plot", "plot_seconds"):
        flags.pop(name, None)
    given = {} if options.accept is not None else {"accept": preset.accept}
    source = "--accept" if options.accept is not None else preset.accept_source
    return {
        "model": preset.model,
        "gpu": f"{preset.devices}x {preset.gpu}",
        **asdict(setup.costs),
        **flags,
        **given,
        "accept_source": source,
    }


def _write(flag: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error}") from error


def _workload(options: argparse.Namespace, accept: float) -> Workload:
    if options.trace:
        return trace(Path(options.trace), accept)
    mix = RequestMix(
        contexts=tuple(options.context),
        output=options.output,
        accept=accept,
        spread=options.accept_spread,
        share=options.share,
        seed=options.seed,
    )
    if options.rate is not None:
        return poisson(mix, options.requests, options.rate)
    return closed_loop(
        mix,
        options.requests,
        warm=int(options.requests * WARM_SHARE),
        concurrency=options.concurrency,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vericache_sglang.simulate",
        description="Compare scheduling policies on modelled hardware. " + LABEL,
    )
    add = parser.add_argument
    add("--preset", default=next(iter(PRESETS)), help="all, or " + ", ".join(PRESETS))
    add("--policies", default="all", help="names with commas between, or all")
    add("--link", type=float, help="GB/s of each device's host link")
    add("--overhead-ms", type=float, default=2.0, help="added to every forward")
    add("--context", type=int, nargs="+", default=[24000], help="prompt tokens")
    add("--output", type=int, default=512, help="tokens each request emits")
    add("--requests", type=int, default=100, help="simulated until so many finished")
    add("--concurrency", type=int, help="most at once; what fits without it")
    add("--rate", type=float, help="Poisson arrivals/s instead of an endless queue")
    add("--trace", help="JSON lines: arrival_s, prompt_tokens, output_tokens, p")
    add("--share", type=int, default=1, help="requests in a row with one prompt")
    add("--keep", type=float, default=0.25, help="share of the KV drafts read")
    add("--accept", type=float, help="probability that a draft is right")
    add("--accept-spread", type=float, default=0.0, help="requests differ by so much")
    add("--planes-accept", type=float, default=PLANES_ACCEPT, help="the same, planes")
    add("--draft-length", type=int, default=32, help="most drafts in a round")
    add("--max-verifies", type=int, default=4, help="verified in one forward")
    add("--inner-length", type=int, help="most tokens an inner drafter proposes")
    add("--inner-accept", type=float, help="probability that one of them is right")
    add("--staged", type=int, default=0, help="residual KVs staged at once; 0: auto")
    add("--host-gb", type=float, default=1000.0, help="host memory for residual KV")
    add("--reserve", type=float, default=1.0, help="share of output kept free")
    add("--prefill", action="store_true", help="prompts are computed, not precomputed")
    add("--seed", type=int, default=0)
    add("--json", help="write figures and assumptions to this file")
    add("--markdown", help="write the tables to this file")
    add("--plot", help="write a picture of the schedule to this file")
    add("--plot-seconds", type=float, default=10.0, help="shown, from the end")
    add_pool_flags(
        parser,
        "two pools instead: L instances near a store, R behind a slow link, and the "
        "paths of remote prefixes; --requests and --concurrency are of each instance",
    )
    add("--sweep", action="store_true", help="with --remote: figure 13, right")
    return parser


if __name__ == "__main__":
    sys.exit(main())
