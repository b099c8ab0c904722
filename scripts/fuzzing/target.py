"""A server under attack: its processes, its log, and what it holds."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from fuzzing.wire import post
from lossless.runs import PATHS, STRICT

HELD = ("kept_slots", "staging_slots", "staging_bytes", "host_bytes", "running")
"""VeriCache's counters of what requests hold; all are zero when none runs."""

FLAGS = (
    *("--max-total-tokens", "3000", "--context-length", "2048", "--sleep-on-idle"),
    *("--chunked-prefill-size", "1024", "--schedule-conservativeness", "0.2"),
    *("--log-level", "warning"),
    *("--tool-call-parser", "llama3", "--reasoning-parser", "deepseek-v3"),
)
"""A small pool and a short context, so that both are exceeded; more is admitted than
the pool holds, so that requests have to make room for others.

Custom logit processors are off: SGLang's scheduler ends at a string that is none.
"""

OURS = (
    *("--vericache-min-prompt", "64", "--vericache-draft-length", "8"),
    *("--vericache-residency", "host", "--vericache-staging-tokens", "1500"),
)
PLAIN = ("--disable-vericache",)


class TargetError(RuntimeError):
    """A server broke a promise; the message names it."""


@dataclass
class Target:
    """A running server.

    Attributes:
        name: As it appears in results.
        url: ``http://host:port``.
        log: File of its output; None where it is not ours to read.
        process: Its first process; None where somebody else started it.
        pids: Its processes, as ``remember`` found them.
    """

    name: str
    url: str
    log: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    pids: frozenset[int] = field(default_factory=frozenset)

    def remember(self) -> None:
        """Note which processes the server has now."""
        self.pids = self._pids()

    def require_alive(self) -> None:
        """Check that every process is there and that the server answers.

        Raises:
            TargetError: It does not; the message ends with the end of its log.
        """
        missing = self.pids - self._pids()
        if missing:
            raise TargetError(f"{self.name}: processes ended\n{self.tail()}")
        try:
            with urlopen(f"{self.url}/health", timeout=60):
                pass
        except OSError as error:
            raise TargetError(f"{self.name}: {error}\n{self.tail()}") from error

    def counters(self) -> dict[str, Any]:
        """Return VeriCache's counters; empty for plain SGLang."""
        with urlopen(f"{self.url}/get_server_info", timeout=60) as reply:
            state: dict[str, Any] = json.loads(reply.read())["internal_states"][0]
        return state.get("vericache", {})

    async def settle(self, seconds: float = 60) -> dict[str, int]:
        """Wait until nothing is held, flush, and return what is held after ``seconds``.

        Raises:
            TargetError: The prefix cache cannot be flushed: something still runs.
        """
        for _ in range(int(seconds / 0.2)):
            counters = await asyncio.to_thread(self.counters)
            held = {name: counters[name] for name in HELD if counters.get(name)}
            if not held:
                break
            await asyncio.sleep(0.2)
        reply = await post(self.url, f"/flush_cache?timeout={seconds:.0f}", {}, 120)
        if reply.status != 200:
            raise TargetError(f"{self.name}: cannot flush: {reply.data.decode()}")
        return held

    def tail(self) -> str:
        """Return the end of the log."""
        return self._text()[-6000:]

    def tracebacks(self) -> list[str]:
        """Return the tracebacks in the log that go through VeriCache's own files."""
        # A traceback goes on while lines are indented, and ends with its exception.
        blocks = re.findall(r"Traceback .*\n(?:[ \t].*\n)+.*", self._text())
        return [block for block in blocks if "vericache_" in block]

    def close(self) -> None:
        """Stop the server."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)

    def _pids(self) -> frozenset[int]:
        if self.process is None:
            return frozenset()
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process.pid)
            family = [first, *first.children(recursive=True)]
            return frozenset(
                each.pid for each in family if each.status() != psutil.STATUS_ZOMBIE
            )
        return frozenset()

    def _text(self) -> str:
        return self.log.read_text(errors="replace") if self.log else ""


def start(name: str, model: Path, flags: tuple[str, ...]) -> Target:
    """Start a server with SGLang's strict memory checks; ``wait`` for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    folder = Path(tempfile.mkdtemp(prefix="vericache-fuzz-"))
    log = folder / f"{name.replace(' ', '-')}.log"
    command = [sys.executable, "-m", "vericache_sglang.launch_server"]
    command += ["--model-path", str(model), "--port", port, *FLAGS, *flags]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **STRICT, "PYTHONPATH": PATHS},
            start_new_session=True,
        )
    return Target(name, f"http://127.0.0.1:{port}", log, process)


async def wait(target: Target, seconds: float = 240) -> None:
    """Wait until ``target`` answers, and remember its processes.

    Raises:
        TargetError: It has ended, or does not answer in time.
    """
    for _ in range(int(seconds / 0.5)):
        if target.process is not None and target.process.poll() is not None:
            raise TargetError(f"{target.name}: ended at start\n{target.tail()}")
        with suppress(TargetError):
            target.require_alive()
            target.remember()
            return
        await asyncio.sleep(0.5)
    raise TargetError(f"{target.name}: not up after {seconds:.0f} s\n{target.tail()}")
