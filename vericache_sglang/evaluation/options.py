"""The command line of a benchmark, checked before anything starts."""

from __future__ import annotations

import argparse
import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.altered import simulated
from vericache_sglang.evaluation.systems import BUILT_IN, chosen_systems, words
from vericache_sglang.evaluation.workload import (
    demo_requests,
    random_requests,
    read_requests,
)

if TYPE_CHECKING:
    from vericache_sglang.evaluation.systems import System
    from vericache_sglang.evaluation.workload import Request

LABEL = "SIMULATED ACCEPTANCE"
"""First words of everything a run with ``--simulated-acceptance`` writes."""

LEAST = {
    **dict.fromkeys(("count", "output", "repeats", "top_k"), 1),
    **dict.fromkeys(("context", "concurrency"), 1),
    **dict.fromkeys(("kl_requests", "seed"), 0),
}
"""Flags of whole numbers, and their least values."""

POSITIVE = ("rates", "memory_gbps", "boot_seconds", "timeout")
"""Flags of numbers above 0."""


def parser() -> argparse.ArgumentParser:
    """Build the parser; what values mean is checked by ``check``."""
    made = argparse.ArgumentParser(
        prog="python -m vericache_sglang.bench",
        description="Compare systems on one list of requests, taking turns.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets bench.json, bench.md, bench.png and the servers' logs",
    )
    _add_systems(made.add_argument_group("systems"))
    _add_requests(made.add_argument_group("requests"))
    _add_load(made.add_argument_group("load"))
    return made


def _add_systems(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", metavar="DIR", help="served by every system that is started")
    add(
        "--systems",
        default="plain,vericache",
        metavar="NAMES",
        help=f"with commas between; known: {', '.join(BUILT_IN)}",
    )
    add(
        "--system",
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="one more, by flags of launch_server",
    )
    add(
        "--base-url",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a system whose server runs already",
    )
    add(
        "--engine",
        default="",
        metavar="FLAGS",
        help="SGLang flags of every server, quoted; one word needs --engine=...",
    )
    add(
        "--vericache",
        default="",
        metavar="FLAGS",
        help="VeriCache flags of every system that drafts, before its own",
    )
    add(
        "--one-at-a-time",
        action="store_true",
        help="start and stop a server for every turn: a device that holds only one",
    )
    add("--boot-seconds", type=float, default=600.0, help="most, for one server")
    add(
        "--simulated-acceptance",
        type=float,
        metavar="P",
        help="accept drafts by dice: for weights that make no sense; everything "
        f"written says {LABEL}",
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--requests", type=Path, metavar="JSONL", help="prompt or input_ids a line")
    add("--random-prompts", action="store_true", help="of random tokens")
    add("--count", type=int, default=8, help="prompts drawn")
    add(
        "--context",
        type=int,
        nargs="+",
        default=[4000],
        metavar="N",
        help="tokens of drawn prompts, in turn",
    )
    add("--output", type=int, default=128, help="tokens of each answer")
    add("--end-early", action="store_true", help="answers may end where they end")
    add("--seed", type=int, default=0, help="of prompts and arrivals")


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--concurrency",
        type=int,
        nargs="+",
        default=[4],
        metavar="N",
        help="clients at once; of several, each system gets its fastest",
    )
    add("--repeats", type=int, default=3, help="rounds in which all take a turn")
    add(
        "--rates",
        type=float,
        nargs="+",
        default=[],
        metavar="R",
        help="also an open loop: Poisson arrivals a second",
    )
    add(
        "--prefill",
        choices=("timed", "cached"),
        default="timed",
        help="cached: prompts are in the prefix cache before the clock starts",
    )
    add("--kl-requests", type=int, default=4, help="compared with a lossy system's")
    add("--top-k", type=int, default=20, help="log-probabilities compared")
    add("--memory-gbps", type=float, help="the device's memory, for kv_read_share")
    add("--timeout", type=float, default=3600.0, help="seconds of one answer")


def check(options: argparse.Namespace) -> tuple[System, ...]:
    """Check what the flags say together; returns the systems.

    Raises:
        ConfigError: A value is out of bounds, or flags contradict each other.
    """
    for name, least in LEAST.items():
        if min(_values(options, name), default=least) < least:
            raise ConfigError(f"{_flag(name)} must be >= {least}")
    for name in POSITIVE:
        if not all(0 < value < math.inf for value in _values(options, name)):
            raise ConfigError(f"{_flag(name)} must be > 0")
    names = [name for name in options.systems.split(",") if name]
    systems = chosen_systems(names, options.system, options.base_url)
    if not options.model and not all(system.url for system in systems):
        raise ConfigError("--model is needed for systems without --base-url")
    if options.requests and options.random_prompts:
        raise ConfigError("--requests and --random-prompts exclude each other")
    if not options.model and not options.requests:
        raise ConfigError("--model is needed to draw prompts; or give --requests")
    _check_label(options, systems)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {options.out}: {error}") from error
    return systems


def _check_label(options: argparse.Namespace, systems: tuple[System, ...]) -> None:
    """Refuse figures that would be worth nothing, or not be what they say."""
    shared = words("--engine", options.engine)
    words("--vericache", options.vericache)
    dummy = "--load-format=dummy" in shared or "dummy" in [
        value for flag, value in pairwise(shared) if flag == "--load-format"
    ]
    if options.simulated_acceptance is None:
        if dummy:
            raise ConfigError(
                "--engine: drafts of dummy weights say nothing about acceptance; "
                "give --simulated-acceptance P, and every output will be labelled"
            )
        return
    simulated(options.simulated_acceptance)
    foreign = [s.name for s in systems if "--speculative-algorithm" in s.flags]
    if foreign:
        raise ConfigError(
            f"--simulated-acceptance: {foreign[0]} would be measured beside simulated "
            "systems; leave it out"
        )


def draw_requests(options: argparse.Namespace) -> list[Request]:
    """Read or draw the requests all systems answer.

    Raises:
        ConfigError: See ``read_requests``, ``random_requests``, ``demo_requests``.
    """
    if options.requests:
        return read_requests(options.requests, options.output)
    lengths = [options.context[i % len(options.context)] for i in range(options.count)]
    draw = random_requests if options.random_prompts else demo_requests
    return draw(Path(options.model), lengths, options.output, options.seed)


def label(options: argparse.Namespace) -> str:
    """Return what every output begins with; "" where all is measured."""
    if options.simulated_acceptance is None:
        return ""
    return (
        f"{LABEL}: each draft is accepted with p = {options.simulated_acceptance:g}, "
        "whatever the model says. Times are measured, acceptance and tokens are not."
    )


def _values(options: argparse.Namespace, name: str) -> list[float]:
    value = getattr(options, name)
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
