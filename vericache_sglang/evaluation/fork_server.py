"""Servers forked off one process that has imported SGLang once.

A fresh server is three processes, and each spends 10 s of a core importing SGLang
before it does anything. Where many are started one after the other, a process that has
imported it (this file, run) forks a child for each, and the child forks its
scheduler and detokenizer too, where SGLang would spawn them. Hooks are applied before
the fork too, for which SGLang looks through all modules. Everything else is as in a
fresh one: plugins, settings, model and pools are loaded after the fork.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from select import select
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError
from vericache_sglang.evaluation.server import ServerError, spawn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vericache_sglang.evaluation.server import Process

PREPARED = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.entrypoints.openai.serving_responses",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang.srt.arg_groups.pipeline",
    "vericache_sglang.serving.launch",
    "vericache_sglang.serving.http_server",
    "vericache_sglang.runtime.worker",
    "vericache_sglang.plugin:apply_hooks",
)
"""Modules that the processes of a server import, and functions that all would call."""

SCHEDULER = "sglang.srt.managers.scheduler"
CONSTANTS = {
    f"SGLANG_TEST_RETRACT{end}": f"TEST_RETRACT{end}"
    for end in ("", "_INTERVAL", "_NO_PREFILL_BS")
}
"""Environment variables that this module reads while imported, into constants that a
child sets anew."""

AFTER_IMPORT = (
    *("VERICACHE_", "PYTHONPATH", "SGLANG_ENABLE_STRICT_MEM_CHECK_", "SGLANG_REQ_"),
    *("SGLANG_DISAGGREGATION_WAITING_", "SGLANG_TEST_DISAGG_", *CONSTANTS),
)
"""Beginnings of those with which a child can be forked: SGLang reads no others of these
names while it is imported."""

DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2): what a child gets when the fork server has ended."""


class ForkedProcess:
    """A child of the fork server, polled as ``subprocess.Popen`` would be.

    Args:
        pid: Its process id, and that of its process group.
        status: File that the fork server writes its exit status to.
    """

    def __init__(self, pid: int, status: Path) -> None:
        self.pid = pid
        self._status = status
        self._handle: int | None = None  # it has ended, and its id is free again
        with suppress(ProcessLookupError):
            self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit status; negative: the signal that ended it; None: it runs."""
        if not self._ended(0):
            return None
        for _ in range(6000):
            if text := self._read():
                return int(text)
            time.sleep(0.01)
        return -signal.SIGKILL  # the fork server has ended, and told nothing

    def wait(self, timeout: float) -> int:
        """Return the exit status once it has ended.

        Raises:
            subprocess.TimeoutExpired: It still runs after ``timeout`` seconds.
        """
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.poll() or 0

    def _ended(self, timeout: float) -> bool:
        handle = self._handle
        return handle is None or bool(select([handle], [], [], timeout)[0])

    def _read(self) -> str:
        return self._status.read_text() if self._status.exists() else ""


class ForkServer:
    """The process that forks; to be closed.

    Args:
        log: File that gets what the fork server itself prints.
        environment: Of the fork server and so of every child, beyond this process's.
        prepared: What it imports and calls, as ``pkgutil.resolve_name`` takes it.
    """

    def __init__(
        self,
        log: Path,
        environment: Mapping[str, str],
        prepared: Sequence[str] = PREPARED,
    ) -> None:
        with log.open("w", encoding="utf-8") as stream:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *prepared],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                start_new_session=True,  # an interrupt stops it through us
                env={**os.environ, **environment},
                text=True,
            )
        self._log, self._environment = log, environment

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> Process:
        """Run ``python -m ...`` in a fork, its output going to ``log``.

        The first call waits for the imports. With a variable that SGLang reads while it
        is imported, and that the fork server has not, a fresh process is started.

        Args:
            command: This interpreter, ``-m``, the module and its arguments.
            environment: Variables beyond those of the fork server.
            log: File for standard output and error.

        Raises:
            InvariantError: ``command`` is no module of this interpreter.
            ServerError: The fork server has ended; says how its log ends.
        """
        if tuple(command[:2]) != (sys.executable, "-m"):
            raise InvariantError(f"only python -m is forked, not {command}")
        late = dict(environment.items() - self._environment.items())
        if not all(name.startswith(AFTER_IMPORT) for name in late):
            return spawn(command, {**self._environment, **environment}, log)
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        line = json.dumps([list(command[2:]), dict(environment), str(log)])
        try:
            requests.write(line + "\n")
            requests.flush()
            return ForkedProcess(int(replies.readline()), status_file(log))
        except (ValueError, OSError) as error:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-6000:]
            raise ServerError(f"no fork server: {tail}") from error

    def close(self) -> None:
        """End it; children that still run get a SIGTERM."""
        self._process.communicate(timeout=30)


@cache
def forks_with(**environment: str) -> ForkServer:
    """Return this process's fork server with these variables, ended at exit."""
    folder = tempfile.TemporaryDirectory(prefix="vericache-forks-")
    forks = ForkServer(Path(folder.name, "forks.log"), environment)
    atexit.register(folder.cleanup)
    atexit.register(forks.close)
    return forks


def status_file(log: Path) -> Path:
    """Return where the exit status of a child with this log stands."""
    return log.with_suffix(".status")


def serve() -> None:
    """Fork a child for every line, [argv, environment, log], and print its id."""
    for name in sys.argv[1:]:
        found = pkgutil.resolve_name(name)
        if callable(found):
            found()
    gc.freeze()
    logs: dict[int, Path] = {}
    parent = os.getpid()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(logs))
    for line in sys.stdin:
        argv, environment, log = json.loads(line)
        status_file(Path(log)).unlink(missing_ok=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            _become(argv, environment, log, parent)
        logs[child] = Path(log)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        print(child, flush=True)


def _reap(logs: dict[int, Path]) -> None:
    """Write down the status of every child that has ended."""
    while logs:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with suppress(FileNotFoundError):  # its log's folder may be gone
            file = status_file(logs.pop(child))
            file.write_text(str(os.waitstatus_to_exitcode(status)))


def _become(
    argv: list[str], environment: dict[str, str], log: str, parent: int
) -> None:
    """Be ``python -m argv`` in a process group of its own; does not return."""
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(status)  # it ended before it was to be noticed
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(stream, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(environment)
        for name in CONSTANTS.keys() & environment.keys():
            value = getattr(pkgutil.resolve_name("sglang.srt.environ:envs"), name).get()
            # A constant of another name would be set without an effect.
            assert CONSTANTS[name] in vars(sys.modules[SCHEDULER]), name
            setattr(sys.modules[SCHEDULER], CONSTANTS[name], value)
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = filter(None, paths)
        multiprocessing.set_start_method("fork", force=True)
        # SGLang asks for "spawn", which would import everything again.
        multiprocessing.set_start_method = lambda *args, **more: None
        sys.argv = argv
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


if __name__ == "__main__":
    serve()
