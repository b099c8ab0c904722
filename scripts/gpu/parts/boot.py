"""One request to a tiny model: plain SGLang and VeriCache, eager and with graphs."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu.part import Check, Step, Summary, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu.part import Context

MODEL = "qwen3-tiny"
PROMPT, OUTPUT = 512, 48
DRAFTING = ("--vericache-min-prompt", "64", "--vericache-residency", "host")
DRAFTING += ("--vericache-draft-length", "4", "--vericache-staging-tokens", "4096")
DRAFTING += ("--vericache-host-gb", "0.5")
"""A prompt this short is drafted for, and its complement leaves the device."""


def steps(context: Context) -> list[Step]:
    """See ``gpu.part.PartModule``."""
    ways = (False,) if context.rehearsal else (False, True)
    return [
        Step(
            f"{system}, {'graphs' if graphs else 'eager'}",
            partial(booted, context, drafts=system == "VeriCache", graphs=graphs),
            90,
        )
        for graphs in ways
        for system in ("plain", "VeriCache")
    ]


def booted(context: Context, *, drafts: bool, graphs: bool) -> dict[str, Any]:
    """Serve the tiny model, ask it once, and return what it said and how long it took.

    Raises:
        ServerError: The server did not start, or did not answer.
    """
    from gpu.models import dummy_model
    from gpu.serving import OFF, backend_flags, request, served, shared_flags

    model = dummy_model(context.out / "models", MODEL)
    backend = context.backend if drafts else context.plain_backend
    flags = [*shared_flags(context, graphs=graphs), *backend_flags(backend)]
    flags += ["--load-format", "dummy", "--cuda-graph-max-bs-decode", "8"]
    flags += DRAFTING if drafts else (OFF,)
    name = (
        f"boot-{'vericache' if drafts else 'plain'}-{'graphs' if graphs else 'eager'}"
    )
    began = time.monotonic()
    with served(model, flags, context.out / f"{name}.log") as server:
        up = time.monotonic() - began
        answer = server.generate(request(PROMPT, OUTPUT, 0, model))
        counters = server.counters()
    return {
        "boot_s": round(up, 1),
        "ids": answer["output_ids"],
        **{key: counters.get(key) for key in ("rounds", "drafted", "splits")},
        "eager_forwards": counters.get("eager_forwards"),
    }


def conclude(context: Context, results: Mapping[str, Any]) -> Summary:
    """See ``gpu.part.PartModule``."""
    checks, rows = [], []
    for name, one in results.items():
        ids = one.get("ids", [])
        checks.append(
            Check(name, f"{OUTPUT} tokens", f"{len(ids)}", len(ids) == OUTPUT)
        )
        if name.startswith("VeriCache"):
            rounds = one.get("rounds") or 0
            checks.append(Check(f"{name} verifies", "> 0", str(rounds), rounds > 0))
            same = ids == results.get(name.replace("VeriCache", "plain"), {}).get("ids")
        else:
            same = True
        shown = [one.get(key) for key in ("boot_s", "rounds", "drafted")]
        shown.append(one.get("eager_forwards"))
        rows.append((name, *map(str, shown), "yes" if same else "no"))
    columns = ("server", "boot s", "rounds", "drafted", "eager forwards", "same tokens")
    done = sum(check.passed for check in checks)
    return Summary(
        headline=f"{len(results)} servers, {done} of {len(checks)} checks met",
        checks=tuple(checks),
        tables=(Table("Boots", columns, tuple(rows)),),
    )
