"""Servers of a benchmark: started, waited for, asked for their counters, stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import VeriCacheError
from vericache_sglang.evaluation.altered import alteration_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


FLUSH_SECONDS = 30.0
"""How long requests whose client has gone may take to end."""


class ServerError(VeriCacheError):
    """A server did not start, died, or is not the one it is said to be."""


class Server:
    """A running server, asked over HTTP.

    Args:
        url: Without a path.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def is_healthy(self) -> bool:
        """Say whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30):
                return True
        except OSError:
            return False

    def wait(self, seconds: float) -> None:
        """Check that it answers; one that somebody else started is not waited for.

        Args:
            seconds: Most, for a server that is starting.

        Raises:
            ServerError: It does not.
        """
        if not self.is_healthy():
            raise ServerError(f"{self.url} does not answer")

    def info(self) -> dict[str, Any]:
        """Return ``GET /get_server_info``.

        Raises:
            ServerError: It does not answer.
        """
        return self._json("/get_server_info")

    def counters(self) -> dict[str, Any]:
        """Return VeriCache's counters; empty without VeriCache.

        Raises:
            ServerError: It does not answer.
        """
        states = self.info().get("internal_states") or [{}]
        found: dict[str, Any] = states[0].get("vericache") or {}
        return found

    def flush(self) -> None:
        """Empty its prefix cache, once nothing is running any more.

        Raises:
            ServerError: It does not answer, or keeps refusing.
        """
        deadline = time.monotonic() + FLUSH_SECONDS
        while True:
            try:
                self._post("/flush_cache", {})
            except ServerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def generate(self, body: Mapping[str, Any]) -> Any:
        """Return the answer to ``POST /generate``, not streamed.

        Raises:
            ServerError: It does not answer, or refuses.
        """
        return json.loads(self._post("/generate", body))

    def require(self, alteration: str) -> None:
        """Check that the server is altered as its label says, and not otherwise.

        Raises:
            ServerError: It is not.
        """
        found = alteration_in(self.counters())
        if found != alteration:
            raise ServerError(
                f"{self.url} is {found or 'not altered'}, "
                f"wanted {alteration or 'not altered'}"
            )

    def close(self) -> None:
        """Leave the server as it is: somebody else started it."""

    def _json(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as reply:
                found: dict[str, Any] = json.loads(reply.read())
        except (OSError, ValueError) as error:
            raise ServerError(f"{self.url}{path}: {error}") from error
        return found

    def _post(self, path: str, body: Mapping[str, Any]) -> bytes:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=3600) as reply:
                text: bytes = reply.read()
        except OSError as error:
            raise ServerError(f"{self.url}{path}: {error}") from error
        return text


class OwnServer(Server):
    """A server this process has started and will stop.

    Args:
        command: Starts it.
        port: It listens on, of the loopback device.
        environment: Variables beyond this process's.
        log: File for what it prints.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        super().__init__(f"http://127.0.0.1:{port}")
        self._log = log
        with log.open("w", encoding="utf-8") as stream:
            self._process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def wait(self, seconds: float) -> None:
        """Wait until it answers.

        Args:
            seconds: Most.

        Raises:
            ServerError: It ended, or did not answer in time; says how its log ends.
        """
        deadline = time.monotonic() + seconds
        while not self.is_healthy():
            if self._process.poll() is not None:
                raise ServerError(f"did not start: {self.last_error()}")
            if time.monotonic() > deadline:
                raise ServerError(f"not up after {seconds:g} s: {self.last_error()}")
            time.sleep(0.5)

    def last_error(self) -> str:
        """Return the last line of its log that names an error, or the last line."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line or "error:" in line]
        return (named or lines or ["it printed nothing"])[-1][:300]

    def close(self) -> None:
        """Stop it and every process it has started."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait(30)


def free_port() -> int:
    """Return a port of the loopback device that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
