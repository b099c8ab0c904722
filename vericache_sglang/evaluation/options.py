"""Options of benchmarks, and those of the comparison checked before it starts."""

from __future__ import annotations

import argparse
import math
import shlex
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.altered import simulated
from vericache_sglang.evaluation.systems import (
    BUILT_IN,
    SPECULATION,
    chosen_systems,
    speculation_lacks,
    weighted,
    words,
)
from vericache_sglang.evaluation.workload import (
    demo_requests,
    random_requests,
    read_requests,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.evaluation.systems import System
    from vericache_sglang.evaluation.workload import BenchRequest

PROGRAM = "python -m vericache_sglang.bench"

LABEL = "SIMULATED ACCEPTANCE"
"""Prefix of every output of a run with ``--simulated-acceptance``."""

LEAST = {
    **dict.fromkeys(("count", "output", "repeats", "top_k"), 1),
    **dict.fromkeys(("context", "concurrency"), 1),
    **dict.fromkeys(("kl_requests", "seed"), 0),
}
"""Flags of whole numbers, and their least values."""

POSITIVE = ("rates", "memory_gbps", "boot_seconds", "timeout")
"""Flags of numbers above 0."""


OPTIONS: Mapping[str, tuple[Any, str]] = {
    "model": (str, "served by every system that is started"),
    "systems": (
        "plain,vericache",
        f"with commas between; known: {', '.join(BUILT_IN)}",
    ),
    "system": ([], "NAME=FLAGS: one more, by flags of launch_server"),
    "draft-model": (str, "small model or EAGLE3 head of the systems that need one"),
    "base-url": ([], "NAME=URL: a system whose server runs already"),
    "engine": ("", "SGLang flags of every server, quoted; one word needs --engine=..."),
    "vericache": ("", "VeriCache flags of every system that drafts, before its own"),
    "one-at-a-time": (False, "start a server for every turn: a device holds only one"),
    "boot-seconds": (600.0, "most, for one server"),
    "simulated-acceptance": (
        float,
        "accept drafts with this probability: for weights that make no sense; "
        f"everything written says {LABEL}",
    ),
    "requests": (Path, "JSON lines with prompt or input_ids"),
    "random-prompts": (False, "of random tokens"),
    "count": (8, "prompts drawn"),
    "context": ([4000], "tokens of drawn prompts, in turn"),
    "output": (128, "tokens of each answer"),
    "end-early": (False, "answers may end where they end"),
    "seed": (0, "of prompts and arrivals"),
    "concurrency": ([4], "clients at once; of several, each system gets its fastest"),
    "repeats": (3, "rounds in which all take a turn"),
    "rates": ([float], "also an open loop: Poisson arrivals a second"),
    "prefill": (
        ("timed", "cached"),
        "cached: prompts are in the prefix cache before the clock starts",
    ),
    "kl-requests": (4, "compared with a lossy system's"),
    "top-k": (20, "log-probabilities compared"),
    "memory-gbps": (float, "the device's memory, for kv_read_share"),
    "timeout": (3600.0, "seconds of one answer"),
}
"""Of the comparison; see ``Benchmark.options``."""


def parser(epilog: str = "") -> argparse.ArgumentParser:
    """Build the parser; what values mean is checked by ``check``.

    Args:
        epilog: Last words of ``--help``.
    """
    made = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Compare systems on one list of requests, taking turns.",
        epilog=epilog,
        allow_abbrev=False,
    )
    made.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets bench.json, bench.md, bench.png and the servers' logs",
    )
    add_options(made, OPTIONS)
    return made


def add_options(
    parser: argparse.ArgumentParser, options: Mapping[str, tuple[Any, str]]
) -> None:
    """Add options to a parser.

    Args:
        parser: Gets them.
        options: Name -> default and help. Of the default: a list takes several values
            (of the type it holds, where that is all it holds), an empty one a value
            each time the option is given; a tuple holds the choices, False is a switch,
            a type stands for None.
    """
    for name, (default, text) in options.items():
        told = "" if _is_unset(default) else f"; default: {_spelled(default)}"
        add = partial(parser.add_argument, f"--{name}", help=text + told)
        if default is False:
            add(action="store_true")
        elif default == []:
            add(action="append", default=[])
        elif isinstance(default, tuple):
            add(choices=default, default=default[0])
        elif isinstance(default, list):
            kind, values = _kind(default[0])
            add(nargs="+", type=kind, default=[] if values is None else default)
        else:
            kind, value = _kind(default)
            add(type=kind, default=value)


def _is_unset(default: Any) -> bool:
    """Return whether an option has no value where it is not given."""
    first = default[0] if isinstance(default, list) and default else default
    return first is False or first in ("", []) or isinstance(first, type)


def _spelled(default: Any) -> str:
    """Spell an option's value as it would be given."""
    if isinstance(default, tuple):
        return str(default[0])
    if isinstance(default, Path):
        return default.name
    if isinstance(default, list):
        return shlex.join(map(str, default))
    return str(default)


def _kind(default: Any) -> tuple[type, Any]:
    """Return the type of an option's value, and its default."""
    if isinstance(default, type):
        return default, None
    return Path if isinstance(default, Path) else type(default), default


def check(options: argparse.Namespace) -> tuple[System, ...]:
    """Check the combination of the flags; returns the systems.

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
    systems = tuple(
        system if system.url else weighted(system, options.model, options.draft_model)
        for system in chosen_systems(names, options.system, options.base_url)
    )
    if not options.model and not all(system.url for system in systems):
        raise ConfigError("--model is needed for systems without --base-url")
    if options.requests and options.random_prompts:
        raise ConfigError("--requests and --random-prompts exclude each other")
    if not options.model and not options.requests:
        raise ConfigError("--model is needed to draw prompts; or give --requests")
    _check_label(options, systems)
    _check_speculation(systems)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {options.out}: {error}") from error
    return systems


def _check_label(options: argparse.Namespace, systems: tuple[System, ...]) -> None:
    """Refuse options that would make figures meaningless or mislabelled."""
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
    foreign = [s.name for s in systems if SPECULATION in s.flags]
    if foreign:
        raise ConfigError(
            f"--simulated-acceptance: {foreign[0]} would be measured beside simulated "
            "systems; leave it out"
        )


def _check_speculation(systems: tuple[System, ...]) -> None:
    """Refuse to start what SGLang itself cannot serve on this machine."""
    lacks = speculation_lacks()
    for system in systems:
        if lacks and SPECULATION in system.flags and not system.url:
            raise ConfigError(
                f"--systems {system.name}: SGLang's own speculation needs {lacks}; "
                f"serve it where there is one and give --base-url {system.name}=URL, "
                "or leave it out"
            )


def draw_requests(options: argparse.Namespace) -> list[BenchRequest]:
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
    """Return the prefix of every output; "" if everything is measured."""
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
