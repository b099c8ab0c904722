"""One window of torch's profiler: idle time between kernels, and waits of the host."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu.part import Check, Step, Summary, Table
from gpu.setups import ACCEPTANCE, DRAFTS, label

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gpu.part import Context
    from gpu.profile_trace import Iteration
    from vericache_sglang.evaluation.server import OwnServer

MOST_IDLE = 0.05
"""Share of an iteration in which no kernel runs."""

FORWARDS = 160
"""Profiled at once."""

LEAST = 20
"""Iterations without a prefill that a window must have, and should have of drafting."""

TRIES = 6
TRACE_SECONDS = 90.0
"""For so many forwards and the writing of their trace."""

IDLE_SECONDS = 10.0
"""The same where no request runs any more, so that no forward comes."""
SIZES = {"cuda": (4, 16000, 3000), "cpu": (2, 500, 400)}
"""Requests at once, tokens of a prompt, tokens of an answer: longer than the window."""

SYSTEMS = ("VeriCache", "plain")


def steps(context: Context) -> list[Step]:
    """See ``gpu.part.PartModule``."""
    systems = SYSTEMS[:1] if context.rehearsal else SYSTEMS
    return [Step(name, partial(profiled, context, name), 150) for name in systems]


def profiled(context: Context, name: str) -> dict[str, Any]:
    """Serve a model, profile it while it decodes, and count.

    Raises:
        RuntimeError: No window had enough iterations.
        ServerError: The server did not start.
    """
    from gpu.models import dummy_model
    from gpu.serving import OFF, backend_flags, marked, served, shared_flags, simulated

    own = "qwen3-tiny" if context.rehearsal else "llama-3.1-8b"
    model = dummy_model(context.out / "models", own)
    drafts = name == "VeriCache"
    flags = [*shared_flags(context), "--load-format", "dummy"]
    flags += backend_flags(context.backend if drafts else context.plain_backend)
    flags += _drafting(context) if drafts else [OFF]
    folder = context.out / "gaps"
    environment = marked(simulated(folder / "altered", ACCEPTANCE)) if drafts else {}
    with served(model, flags, folder / f"{name}.log", environment) as server:
        asking = _ask(server, model, SIZES[context.device])
        best: list[Iteration] = []
        for number in range(TRIES):
            _start(context, server, folder, f"{name}-{number}")
            found = _trace(folder, f"{name}-{number}", asking)
            kept = [one for one in found if not one.prefills]
            best = max(best, kept, key=partial(_worth, drafts=drafts))
            if _worth(best, drafts=drafts) >= LEAST or not _any_alive(asking):
                break
    if len(best) < LEAST:
        raise RuntimeError(f"a window with {LEAST} decode iterations never came")
    return sums(best)


def _worth(found: list[Iteration], *, drafts: bool) -> int:
    """Count the iterations a window is profiled for."""
    return sum(one.only_drafts for one in found) if drafts else len(found)


def _drafting(context: Context) -> list[str]:
    flags = ["--vericache-residency", "host"]
    if context.rehearsal:
        flags += ["--vericache-min-prompt", "64", "--vericache-draft-length", "8"]
        return [*flags, "--vericache-staging-tokens", "4096"]
    return [*flags, "--vericache-draft-length", str(DRAFTS)]


def _ask(
    server: OwnServer, model: Path, size: tuple[int, int, int]
) -> list[threading.Thread]:
    """Send requests that run while the server is profiled."""
    from gpu.serving import request

    count, prompt, output = size
    threads = [
        threading.Thread(
            target=_until_closed,
            args=(server, request(prompt, output, seed, model)),
            daemon=True,
        )
        for seed in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads


def _until_closed(server: OwnServer, body: dict[str, Any]) -> None:
    from vericache_sglang.evaluation.server import ServerError

    try:
        server.generate(body)
    except (ServerError, ValueError):  # its server has been closed, as planned
        return


def _any_alive(threads: list[threading.Thread]) -> bool:
    return any(thread.is_alive() for thread in threads)


def _start(context: Context, server: OwnServer, folder: Path, name: str) -> None:
    """Have the server profile its next forwards.

    Raises:
        RuntimeError: It does not.
    """
    body = {
        "output_dir": str(folder),
        "profile_id": name,
        "num_steps": FORWARDS,
        "activities": ["CPU"] if context.rehearsal else ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": False,
    }
    asked = urllib.request.Request(
        f"{server.url}/start_profile",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(asked, timeout=60).close()
    except OSError as error:
        raise RuntimeError(f"/start_profile: {error}; {server.last_error()}") from error


def _trace(folder: Path, name: str, asking: list[threading.Thread]) -> list[Iteration]:
    """Return the iterations of a profile; none where the requests ended before it."""
    from gpu.profile_trace import iterations, read

    began = time.monotonic()
    while time.monotonic() < began + (
        TRACE_SECONDS if _any_alive(asking) else IDLE_SECONDS
    ):
        files = list(folder.glob(f"{name}-TP-0*.trace.json.gz"))
        try:
            if files:
                return iterations(read(files[0]))
        except (OSError, ValueError):  # still being written
            pass
        time.sleep(0.5)
    print(f"no trace of {name}", flush=True)
    return []


def sums(found: list[Iteration]) -> dict[str, Any]:
    """Return the sums over all iterations, and over those in which rows only draft."""
    drafting = [one for one in found if one.only_drafts]
    return {
        "all": _sums(found),
        "drafting": _sums(drafting),
        "kinds": dict(Counter("+".join(sorted(one.rows)) for one in found)),
        "worst": asdict(max(found, key=lambda one: one.idle_us)),
    }


def _sums(found: list[Iteration]) -> dict[str, Any]:
    window = sum(one.window_us for one in found)
    return {
        "iterations": len(found),
        "idle_share": sum(one.idle_us for one in found) / window if window else None,
        "window_us": window / len(found) if found else None,
        **{
            key: sum(getattr(one, key) for one in found)
            for key in ("kernels", "waits", "event_waits", "blocking_copies")
        },
    }


def conclude(context: Context, results: Mapping[str, Any]) -> Summary:
    """See ``gpu.part.PartModule``."""
    rows, checks = [], []
    for name, one in results.items():
        for kind in ("all", "drafting"):
            if kind in one:
                rows.append((f"{name}, {kind}", *_cells(one[kind])))
    ours = results.get("VeriCache", {})
    if ours.get("drafting") and not context.rehearsal:
        idle, drafting = ours["all"]["idle_share"], ours["drafting"]
        told = "no kernel seen" if idle is None else f"{idle:.1%}"
        met = idle is not None and idle < MOST_IDLE
        checks.append(Check("idle between kernels", f"< {MOST_IDLE:.0%}", told, met))
        for key, words in (
            ("waits", "waits for a stream"),
            ("blocking_copies", "blocking copies to the host"),
        ):
            count = drafting[key]
            what = f"{words} in {drafting['iterations']} drafting iterations"
            sound = count == 0 and drafting["iterations"] > 0
            checks.append(Check(what, "0", str(count), sound))
    elif ours.get("drafting"):
        count = ours["drafting"]["iterations"]
        checks.append(
            Check("drafting iterations are seen", "> 0", f"{count}", count > 0)
        )
    columns = ("iterations", "count", "idle", "us each", "kernels each", "waits")
    columns += ("event waits", "blocking copies")
    shown = "; ".join(f"{check.what}: {check.got}" for check in checks)
    return Summary(
        headline=f"{label(ACCEPTANCE)[:20]}. {shown}",
        checks=tuple(checks),
        tables=(Table("Windows (SIMULATED ACCEPTANCE)", columns, tuple(rows)),),
        label=label(ACCEPTANCE),
    )


def _cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    count, idle, each = one["iterations"], one["idle_share"], one["window_us"]
    return (
        str(count),
        "-" if idle is None else f"{idle:.1%}",
        f"{each:.0f}" if each else "-",
        f"{one['kernels'] / count:.0f}" if count else "-",
        *(str(one[key]) for key in ("waits", "event_waits", "blocking_copies")),
    )
