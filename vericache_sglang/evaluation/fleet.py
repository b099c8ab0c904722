"""The servers of systems: one started for a while, or a fleet of them kept running."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vericache_sglang.evaluation import altered
from vericache_sglang.evaluation.fork_server import forks_with
from vericache_sglang.evaluation.server import (
    OwnServer,
    Server,
    ServerError,
    free_port,
    spawn,
)
from vericache_sglang.evaluation.systems import command, words

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from vericache_sglang.evaluation.server import Starter
    from vericache_sglang.evaluation.systems import System

BOOT_SECONDS = 600.0

QUIET = (
    *("--log-level", "warning", "--skip-server-warmup", "--sleep-on-idle"),
    *("--max-total-tokens", "196608", "--max-running-requests", "16"),
)
"""Flags of servers that a named benchmark starts, before a system's own. An idle server
must not take the cores of the one that is measured."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""On a shared machine of 2 cores a second OpenMP thread spins at each barrier: the same
requests took 2.2 s with one and 31 s with two. Compiling SGLang's seeded sampler for a
CPU takes 20 s at its first use."""

CHECKED = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
"""SGLang's own accounting, asserted after every scheduler iteration."""


def starter() -> Starter:
    """Return what starts a server with one thread.

    It is forked off a process that has imported SGLang, or fresh where there is a GPU,
    whose context a fork must not share.
    """
    return spawn if torch.cuda.is_available() else forks_with(**ONE_THREAD).start


@contextmanager
def served(
    system: System,
    model: Path,
    *,
    checked: bool = False,
    start: Starter | None = None,
) -> Iterator[OwnServer]:
    """Serve a system for as long as the context lasts.

    Args:
        system: How to serve; not running yet.
        model: Folder of the model.
        checked: With SGLang's strict memory checks, which take time.
        start: How to start the server's command; None: see ``starter``.

    Raises:
        ServerError: The server does not start or does not answer; the message ends with
            the end of its log.
    """
    strict = CHECKED if checked else {}
    system = replace(system, environment={**ONE_THREAD, **strict, **system.environment})
    with tempfile.TemporaryDirectory(prefix="vericache-bench-") as name:
        folder, port = Path(name), free_port()
        shared = [*QUIET, "--nccl-port", str(free_port())]
        server = OwnServer(
            command(system, str(model), port, shared, ()),
            port,
            environment_of(system, folder),
            folder / "server.log",
            start or starter(),
        )
        try:
            server.wait(BOOT_SECONDS)
            if system.has_vericache:
                server.require(system.alteration)
            yield server
        except ServerError as error:
            tail = server.output()[-6000:]
            raise ServerError(f"{system.name}: {error}\n{tail}") from error
        finally:
            server.close(at_once=True)


def environment_of(system: System, folder: Path) -> dict[str, str]:
    """Return the variables of a system's server beyond this process's.

    Args:
        system: To be started.
        folder: Of the caller's own, kept as long as the server runs.
    """
    environment = dict(system.environment)
    if system.alteration:
        given = {**os.environ, **environment}
        environment |= altered.environment(folder, system.alteration, given)
    return environment


class Fleet:
    """The servers of a benchmark; to be closed.

    Args:
        options: The command line, checked.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._servers: dict[str, Server] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="vericache-bench-")

    def alteration(self, system: System) -> str:
        """Return how a system's server is to be altered; "" for not at all."""
        if system.alteration:
            return system.alteration
        accept = self._options.simulated_acceptance
        if accept is None or not system.has_vericache:
            return ""
        return altered.simulated(accept)

    def ready(self, system: System) -> tuple[Server, bool]:
        """Return a system's server, up, and whether this has just started it.

        Raises:
            ServerError: It does not start, is not altered as it has to be, or has
                dummy weights that no label tells of.
        """
        running = self._servers.get(system.name)
        if running is not None:
            return running, False
        if self._options.one_at_a_time:
            self._stop()
        server = self._open(system)
        try:
            server.wait(self._options.boot_seconds)
            server.require(self.alteration(system))
            self._require_weights(server)
        except BaseException:
            server.close()
            raise
        self._servers[system.name] = server
        return server, True

    def close(self) -> None:
        """Stop every server that was started here."""
        self._stop()
        self._folder.cleanup()

    def _require_weights(self, server: Server) -> None:
        """Refuse dummy weights without the label, however they were asked for.

        Raises:
            ServerError: The server has them.
        """
        dummy = server.info().get("load_format") == "dummy"
        if dummy and self._options.simulated_acceptance is None:
            raise ServerError(
                f"{server.url} has dummy weights: give --simulated-acceptance P"
            )

    def _stop(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def _open(self, system: System) -> Server:
        if system.url:
            return Server(system.url)
        options, port = self._options, free_port()
        changed = replace(system, alteration=self.alteration(system))
        folder = Path(self._folder.name, system.name)
        shared, ours = words("--engine", options.engine), options.vericache
        return OwnServer(
            command(system, options.model, port, shared, words("--vericache", ours)),
            port,
            environment_of(changed, folder),
            options.out / f"{system.name}.log",
        )
