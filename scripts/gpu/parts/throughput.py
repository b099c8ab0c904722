"""Tokens per second of VeriCache and of plain SGLang with the same memory.

Weights are random, so acceptance is simulated: everything written says so.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu.budgets import Share, drafting_share, plain_share
from gpu.part import ROOT, Check, Step, Summary, Table
from gpu.setups import (
    ACCEPTANCE,
    DRAFTS,
    HOST_GIB,
    KEEP,
    SETUPS,
    SYSTEMS,
    TOY,
    TOY_SLOTS,
    Setup,
    label,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gpu.part import Context
    from vericache_sglang.evaluation.server import Server


def steps(context: Context) -> list[Step]:
    """See ``gpu.part.PartModule``."""
    setups = (TOY,) if context.rehearsal else SETUPS
    return [
        Step(f"{setup.name}: {system}", partial(measured, context, setup, system), 240)
        for setup in setups
        for system in SYSTEMS
    ]


def measured(context: Context, setup: Setup, system: str) -> dict[str, Any]:
    """Start a system's server and measure it at every point of a setup.

    Raises:
        RuntimeError: A prompt does not fit what the card leaves.
        ServerError: The server did not start, or does not answer.
    """
    from gpu.models import dummy_model
    from gpu.serving import served, simulated

    drafts = system == "VeriCache"
    budget = _budget(context, setup)
    share = _share(setup, budget, drafts=drafts)
    found = {"budget": budget, **asdict(share)}
    if not share.at_once:
        raise RuntimeError(
            f"no request fits: {budget} slots, {share.staging} of them for staging, "
            f"leave {share.pool}; the longest prompt is {setup.points[0][0]} tokens"
        )
    model = ROOT / "configs" / "demo-model"
    if setup.model:
        model = dummy_model(context.out / "models", setup.model)
    flags = server_flags(context, setup, share, drafts=drafts)
    folder = context.out / "throughput"
    environment = simulated(folder / "altered", ACCEPTANCE) if drafts else {}
    log = folder / f"{setup.name}, {system}.log"
    with served(model, flags, log, environment) as server:
        _warm(server, model, setup)
        found["points"] = [_point(server, model, point) for point in setup.points]
    return found


def server_flags(
    context: Context, setup: Setup, share: Share, *, drafts: bool
) -> list[str]:
    """Return the flags of a system's server, its model's folder apart."""
    from gpu.serving import OFF, backend_flags, shared_flags

    # Of a flag that is given twice the last counts.
    flags = [*shared_flags(context), "--max-total-tokens", str(share.pool)]
    if setup.model:
        flags += ["--load-format", "dummy", "--mem-fraction-static", "0.93"]
        flags += ["--chunked-prefill-size", "4096"]
        flags += ["--cuda-graph-max-bs-decode", "64"]
    flags += backend_flags(context.backend if drafts else context.plain_backend)
    return flags + (_drafting(setup, share) if drafts else [OFF])


def _budget(context: Context, setup: Setup) -> int:
    """Return the KV slots of a setup's card."""
    if context.rehearsal:
        return TOY_SLOTS
    import torch

    from vericache_sglang.planning.models import find_model

    shape = find_model(setup.model)
    whole = torch.cuda.get_device_properties(0).total_memory
    return setup.card.slots(shape.weight_bytes, shape.kv_bytes_per_token, whole)


def _share(setup: Setup, budget: int, *, drafts: bool) -> Share:
    prompt, _, output = max(setup.points)
    if drafts:
        return drafting_share(budget, prompt, output, KEEP)
    return plain_share(budget, prompt, output)


def _drafting(setup: Setup, share: Share) -> list[str]:
    flags = ["--vericache-keep", str(KEEP), "--vericache-draft-length", str(DRAFTS)]
    flags += ["--vericache-staging-tokens", str(share.staging)]
    if setup is TOY:
        return [*flags, "--vericache-min-prompt", "64", "--vericache-host-gb", "0.5"]
    return [*flags, "--vericache-host-gb", str(HOST_GIB)]


def _warm(server: Server, model: Path, setup: Setup) -> None:
    """Have everything compiled that is compiled at first use."""
    from gpu.serving import request

    server.generate(request(min(4000, setup.points[0][0]), 64, 99, model))


def _point(server: Server, model: Path, point: tuple[int, int, int]) -> dict[str, Any]:
    """Measure one load: once for its prompts alone, once whole."""
    from gpu.serving import request
    from vericache_sglang.evaluation.client import closed_loop
    from vericache_sglang.evaluation.figures import pass_figures

    prompt, count, output = point
    passes = []
    for tokens in (1, output):
        server.flush()
        bodies = [request(prompt, tokens, seed, model) for seed in range(count)]
        before = server.counters()
        done = closed_loop(server.url, bodies, count, lambda: None, 1800)
        passes.append(pass_figures(done, before, server.counters(), None))
    prefills, whole = passes
    decoded = whole["output_tokens"] - count
    seconds = whole["seconds"] - prefills["seconds"]
    keys = ("tokens_per_s", "seconds", "errors", "failed_requests", "counters")
    return {
        "point": list(point),
        "prefill_s": prefills["seconds"],
        "decode_tokens_per_s": decoded / seconds if seconds > 0 else 0.0,
        "accepted_per_verify": whole["accepted_per_verify"],
        **{key: whole[key] for key in keys},
    }


def conclude(context: Context, results: Mapping[str, Any]) -> Summary:
    """See ``gpu.part.PartModule``."""
    checks, rows, shown = [], [], []
    for setup in (TOY, *SETUPS):
        plain, ours = (results.get(f"{setup.name}: {one}", {}) for one in SYSTEMS)
        for system, one in zip(SYSTEMS, (plain, ours), strict=True):
            rows += _rows(setup, system, one)
        pairs = zip(plain.get("points", ()), ours.get("points", ()), strict=False)
        for base, point in pairs:
            ratio = _ratio(point, base, "decode_tokens_per_s")
            what = f"{setup.name}, {_words(point)}"
            shown.append(f"{what} {ratio:.2f}x")
            told = (
                f"{ratio:.2f}; with prefills {_ratio(point, base, 'tokens_per_s'):.2f}"
            )
            failed = base["failed_requests"] + point["failed_requests"]
            told += f"; {failed} requests failed" * bool(failed)
            met = ratio >= setup.least and not failed
            checks.append(Check(what, f">= {setup.least:g}", told, met))
    columns = ("setup", "system", "load", "pool + staging slots", "fit at once")
    columns += ("tokens/s", "decoding, tokens/s", "accepted per verification")
    meaning = "decoding: the same prompts' time for one token each is taken off"
    title = f"Throughput (SIMULATED ACCEPTANCE p = {ACCEPTANCE:g}); {meaning}"
    return Summary(
        headline=f"SIMULATED ACCEPTANCE. {'; '.join(shown) or 'no pair measured'}",
        checks=tuple(checks),
        tables=(Table(title, columns, tuple(rows)),),
        label=label(ACCEPTANCE),
    )


def _rows(setup: Setup, system: str, one: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for every point of a system."""
    slots = f"{one.get('pool', '-')} + {one.get('staging', '-')}"
    return [
        (
            setup.name,
            system,
            _words(point),
            slots,
            str(one["at_once"]),
            f"{point['tokens_per_s']:.1f}",
            f"{point['decode_tokens_per_s']:.1f}",
            f"{point['accepted_per_verify'] or 0:.1f}",
        )
        for point in one.get("points", ())
    ]


def _words(point: Mapping[str, Any]) -> str:
    prompt, count, output = point["point"]
    return f"{count} x {prompt} + {output} tokens"


def _ratio(ours: Mapping[str, Any], base: Mapping[str, Any], key: str) -> float:
    return ours[key] / base[key] if base[key] else 0.0
