"""Servers of a benchmark: started, waited for, asked, stopped."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from vericache_sglang.errors import ConfigError, VeriCacheError
from vericache_sglang.evaluation.altered import alteration_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    Starter = Callable[[Sequence[str], Mapping[str, str], Path], "Process"]
    """Starts a command with further environment variables, its output in a file."""

FLUSH_SECONDS = 120.0
"""Timeout for aborting requests of disconnected clients, in seconds."""

PORTS = range(12000, 32000)
"""Ports that servers are started on."""

STOP_SECONDS = 30.0
"""Timeout for a server to end after a signal, in seconds."""


class ServerError(VeriCacheError):
    """A server did not start, died, or is not the one it is said to be."""


class Process(Protocol):
    """The first process of a server; it leads a process group of its own."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""

    def wait(self, timeout: float) -> int:
        """Return the exit status once it has ended.

        Raises:
            subprocess.TimeoutExpired: It still runs after ``timeout`` seconds.
        """


class Server:
    """A running server, asked over HTTP.

    Args:
        url: Without a path.
        timeout: Most seconds of one answer.
    """

    def __init__(self, url: str, timeout: float = 3600.0) -> None:
        self.url = url
        self._timeout = timeout

    def is_healthy(self) -> bool:
        """Return whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30):
                return True
        except OSError:
            return False

    def wait(self, seconds: float) -> None:
        """Check that it answers; a server that was running before is not waited for.

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
        found: dict[str, Any] = self.ask("/get_server_info")
        return found

    def counters(self) -> dict[str, Any]:
        """Return VeriCache's counters; empty without VeriCache.

        Raises:
            ServerError: It does not answer.
        """
        states = self.info().get("internal_states") or [{}]
        found: dict[str, Any] = states[0].get("vericache") or {}
        return found

    def flush(self) -> None:
        """Empty its prefix cache, once no request runs any more.

        Raises:
            ServerError: It does not answer, or keeps refusing.
        """
        deadline = time.monotonic() + FLUSH_SECONDS
        while True:
            try:
                self.ask("/flush_cache", {})
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
        return self.ask("/generate", body)

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the content of a JSON reply, or the text of another one.

        Args:
            path: Asked with GET; with POST where there is a ``body``.
            body: Sent as JSON.

        Raises:
            ServerError: It does not answer, or with an error status.
        """
        try:
            text = self.fetch(path, body).decode()
        except OSError as error:
            raise ServerError(f"{self.url}{path}: {error}") from error
        return json.loads(text) if text.startswith(("{", "[")) else text

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the content of a reply; see ``ask``.

        Raises:
            OSError: It does not answer, or with an error status.
        """
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        # A state is known at once; an answer may take long.
        timeout = 60.0 if body is None else self._timeout
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            content: bytes = reply.read()
        return content

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
        """Leave the server running: it was not started here."""


class OwnServer(Server):
    """A server this process has started and will stop.

    Args:
        command: Starts it.
        port: It listens on, of the loopback device.
        environment: Variables beyond this process's.
        log: File for its output.
        start: How to start the command.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str],
        log: Path,
        start: Starter | None = None,
    ) -> None:
        super().__init__(f"http://127.0.0.1:{port}")
        self.log = log
        self.process: Process = (start or spawn)(command, environment, log)

    def wait(self, seconds: float) -> None:
        """Wait until it answers.

        Args:
            seconds: Most.

        Raises:
            ServerError: It ended, or did not answer in time; says how its log ends.
        """
        deadline = time.monotonic() + seconds
        while not self.is_healthy():
            if self.process.poll() is not None:
                raise ServerError(f"did not start: {self.last_error()}")
            if time.monotonic() > deadline:
                raise ServerError(f"not up after {seconds:g} s: {self.last_error()}")
            time.sleep(0.1)

    def pin(self, cores: Collection[int]) -> None:
        """Have every thread of its processes run on these cores alone."""
        first = psutil.Process(self.process.pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                for thread in process.threads():
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.id, cores)

    def hold(self) -> None:
        """Have its processes stand still until ``go_on``."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Have its processes run again; nothing if they do."""
        self._signal(signal.SIGCONT)

    def last_error(self) -> str:
        """Return the last line of its log that names an error, or the last line."""
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line or "error:" in line]
        return (named or lines or ["it printed nothing"])[-1][:300]

    def output(self) -> str:
        """Return its whole log."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def close(self, *, at_once: bool = False) -> None:
        """Stop it and every process it has started.

        Args:
            at_once: Without the seconds that SGLang takes to drain.
        """
        for sign in (signal.SIGTERM, signal.SIGKILL)[at_once:]:
            if not self._signal(sign):
                break
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait(STOP_SECONDS)

    def _signal(self, sign: signal.Signals) -> bool:
        """Signal its process group; return whether there is one.

        What it has started may outlive it, and keeps its process id from being given
        to others. Once it has ended, a process with this id is not ours.
        """
        pid = self.process.pid
        if self.process.poll() is not None and psutil.pid_exists(pid):
            return False
        try:
            os.killpg(pid, sign)
        except ProcessLookupError:
            return False
        return True


def spawn(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own.

    Args:
        command: Program and arguments.
        environment: Variables beyond this process's.
        log: File for its output.
    """
    with log.open("w", encoding="utf-8") as stream:
        return subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def halves() -> tuple[set[int], set[int]]:
    """Return the cores of this process in two sets of one size.

    Raises:
        ConfigError: There is one core.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if not half:
        raise ConfigError("two systems at once need two cores")
    return set(cores[:half]), set(cores[half : 2 * half])


def free_port() -> int:
    """Return a port of the loopback device on which nothing listens now.

    It is given to no other caller, of whatever process of this machine, as long as this
    process lives: a server listens on it seconds later. The kernel gives ports from
    32768 on to connections: one of those might be taken before that.
    """
    while True:
        port = secrets.choice(PORTS)
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0vericache-port-{port}")
        except OSError:
            mark.close()
            continue
        _GIVEN.append(mark)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


_GIVEN: list[socket.socket] = []
"""Names of ports that this process was given; abstract ones, which end with it."""
