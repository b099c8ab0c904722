"""Has the server of each system running when its turn comes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from vericache_sglang.evaluation.altered import LOSSY, environment, simulated
from vericache_sglang.evaluation.server import (
    OwnServer,
    Server,
    ServerError,
    free_port,
)
from vericache_sglang.evaluation.systems import command, words

if TYPE_CHECKING:
    import argparse

    from vericache_sglang.evaluation.systems import System


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
        if system.lossy:
            return LOSSY
        accept = self._options.simulated_acceptance
        if accept is None or not system.has_vericache:
            return ""
        return simulated(accept)

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
        alteration = self.alteration(system)
        folder = Path(self._folder.name, system.name)
        return OwnServer(
            command(
                system,
                options.model,
                port,
                words("--engine", options.engine),
                words("--vericache", options.vericache),
            ),
            port,
            environment(folder, alteration) if alteration else {},
            options.out / f"{system.name}.log",
        )
