"""Three servers forked off a process that has imported SGLang once.

A fresh server is three processes that each spend 10 s of a core importing SGLang. A
fork has imported it; plugins, patches, model and pools are loaded after the fork.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.server import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)
"""What the processes of a server import; the plugins are not among it."""

LAUNCHER = "vericache_sglang.launch_server"
BOOT_SECONDS = 300.0
STOP_SECONDS = 15.0
DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2): sent to a server when the demo is killed."""


class DemoError(Exception):
    """A server did not start, or ended; the message holds the end of its log."""


def import_sglang() -> None:
    """Import what every server needs; before any thread is started."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiles nothing that is used
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()


@dataclass(frozen=True)
class Answer:
    """What a server said to one request.

    Attributes:
        text: As a client reads it.
        tokens: Their ids, in order.
    """

    text: str
    tokens: tuple[int, ...]


class Server:
    """A forked server, in a process group of its own.

    Args:
        flags: Of ``launch_server``.
        environment: Variables beyond this process's.
        log: File for its output.
        port: Of the loopback device; 0 takes a free one.
    """

    def __init__(
        self,
        flags: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        port: int = 0,
    ) -> None:
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._status: int | None = None
        where = ["--host", "127.0.0.1", "--port", str(port)]
        argv = [LAUNCHER, *flags, *where, "--nccl-port", str(free_port())]
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            _become(argv, environment, log)

    def wait_until_healthy(self) -> None:
        """Wait until it answers.

        Raises:
            DemoError: It ended, or does not answer in ``BOOT_SECONDS``.
        """
        deadline = time.monotonic() + BOOT_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=30):
                    return
            except OSError as error:
                if self.has_ended() or time.monotonic() > deadline:
                    raise DemoError(f"no server: {error}\n{self._tail()}") from error
            time.sleep(0.2)

    def generate(self, prompts: Sequence[Sequence[int]], most: int) -> list[Answer]:
        """Return the greedy answers to prompts, all sent at once.

        Args:
            prompts: Token ids of each.
            most: Tokens of an answer.

        Raises:
            DemoError: The server ended or refused.
        """
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"temperature": 0, "max_new_tokens": most},
        }
        request = urllib.request.Request(
            f"{self.url}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                found: list[dict[str, Any]] = json.load(reply)
        except OSError as error:
            raise DemoError(f"no answer: {error}\n{self._tail()}") from error
        return [Answer(each["text"], tuple(each["output_ids"])) for each in found]

    def has_ended(self) -> bool:
        """Say whether its first process has ended."""
        if self._status is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if ended else None
        return self._status is not None

    def stop(self) -> None:
        """End it and everything it has started; a second call does nothing."""
        for sign, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self._pid, sign)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + seconds
            while not self.has_ended() and time.monotonic() < deadline:
                time.sleep(0.05)

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-30:])


def _become(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Be ``python -m argv`` in a process group of its own; does not return."""
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM)
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, signal.SIG_DFL)
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor in (1, 2):
            os.dup2(stream, descriptor)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        os.environ.update(environment)
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = filter(None, paths)
        multiprocessing.set_start_method("fork", force=True)
        # SGLang asks for "spawn", which would import everything again.
        forked: Callable[..., None] = lambda *args, **more: None  # noqa: E731
        multiprocessing.set_start_method = forked
        sys.argv = list(argv)
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else bool(ended.code)
    except Exception:
        logging.getLogger(__name__).exception("%s failed", argv[0])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
