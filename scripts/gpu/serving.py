"""Servers of the parts: their flags on this device, up for as long as they are used."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpu.part import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from gpu.part import Context
    from vericache_sglang.evaluation.server import OwnServer

BOOT_SECONDS = 300.0

MARKS = ROOT / "scripts" / "gpu" / "marks"
"""A plugin that says in a profile what each iteration did."""

OFF = "--disable-vericache"

EAGER = ("--cuda-graph-backend-decode", "disabled")


def shared_flags(context: Context, *, graphs: bool = True) -> list[str]:
    """Return SGLang's flags of every server on this device.

    Args:
        context: See there.
        graphs: Decode in CUDA graphs; a rehearsal has none.
    """
    flags = ["--skip-server-warmup", "--random-seed", "0", "--log-level", "warning"]
    if context.rehearsal:
        return [*flags, "--max-total-tokens", "16384", "--max-running-requests", "8"]
    # flashinfer's sampling and xgrammar compile at first use, minutes of them.
    flags += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
    flags += ["--cuda-graph-backend-prefill", "disabled"]
    return flags if graphs else [*flags, *EAGER]


def backend_flags(name: str) -> list[str]:
    """Return the flag of an attention backend; none where SGLang chooses."""
    return ["--attention-backend", name] if name else []


@contextmanager
def served(
    model: Path,
    flags: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[OwnServer]:
    """Serve a model for as long as the context lasts.

    Args:
        model: Its folder.
        flags: Of ``vericache_sglang.launch_server``.
        log: File for what the server prints.
        environment: Variables beyond this process's.

    Raises:
        ServerError: It does not start; says how its log ends.
    """
    from vericache_sglang.evaluation.server import OwnServer, free_port

    port = free_port()
    command = [sys.executable, "-m", "vericache_sglang.launch_server"]
    command += ["--model-path", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), *flags]
    log.parent.mkdir(parents=True, exist_ok=True)
    server = OwnServer(command, port, environment or {}, log)
    try:
        server.wait(BOOT_SECONDS)
        yield server
    finally:
        server.close()


def simulated(folder: Path, acceptance: float) -> dict[str, str]:
    """Return what makes a server accept drafts by dice, for its environment."""
    from vericache_sglang.evaluation import altered

    folder.mkdir(parents=True, exist_ok=True)
    return altered.environment(folder, altered.simulated(acceptance))


def marked(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a server marks its iterations."""
    paths = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    found = [str(MARKS), *filter(None, [paths])]
    return {**environment, "PYTHONPATH": os.pathsep.join(found)}


def request(length: int, tokens: int, seed: int, model: Path) -> dict[str, Any]:
    """Return the body of a greedy request of random tokens.

    Args:
        length: Of its prompt, in tokens.
        tokens: Of its answer, exactly.
        seed: Other seeds give other prompts.
        model: Folder that says how many tokens there are.
    """
    from vericache_sglang.evaluation.workload import random_requests

    return random_requests(model, [length], tokens, seed)[0].body(ends=False)
