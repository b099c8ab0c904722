"""Engines forked off one process that has imported SGLang once.

A fresh engine is three processes, and each spends about 10 s of a core importing
SGLang before it does anything. Where many engines are started one after the other, a
process that has imported it (``python -m lossless.warm``) forks a child per engine, and
the engine forks its scheduler and detokenizer too, where SGLang would spawn them.
Everything else is what ``lossless.runs.run`` does: plugins, patches, model and pools
are loaded after the fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from select import select
from typing import TYPE_CHECKING, Any

from lossless.runs import ENGINE, PATHS, STRICT, RunError, run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lossless.runs import System

IMPORTED = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.qwen3",
)
"""What an engine's processes import; the plugins are not among it."""

AFTER_IMPORT = ("VERICACHE_", "PYTHONPATH")
"""Environment variables that SGLang does not read while it is imported."""


class WarmEngines:
    """Starts engines by forking; to be closed.

    Args:
        log: File that gets what the warm process itself prints.
    """

    def __init__(self, log: Path) -> None:
        with log.open("w", encoding="utf-8") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lossless.warm"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env={**os.environ, **STRICT, "PYTHONPATH": PATHS},
                text=True,
            )
        self._log = log

    def run(
        self,
        system: System,
        model: Path,
        waves: list[dict[str, Any]],
        timeout: float = 1800,
    ) -> dict[str, Any]:
        """Answer ``waves`` with an engine of its own; see ``lossless.runs.run``.

        A system with environment variables that SGLang reads while it is imported is
        started from scratch.

        Raises:
            RunError: The engine failed or took too long.
        """
        if not all(name.startswith(AFTER_IMPORT) for name in system.environment):
            return run(system, model, waves, timeout)
        with tempfile.TemporaryDirectory() as folder:
            job, out = Path(folder, "job.json"), Path(folder, "out.json")
            log = Path(folder, "log.txt")
            description = {
                "engine": {**ENGINE, "model_path": str(model), **system.engine},
                "settings": system.settings,
                "environment": {**STRICT, **system.environment},
                "waves": waves,
            }
            job.write_text(json.dumps(description), encoding="utf-8")
            self._ask([str(job), str(out), str(log)], timeout)
            if not out.exists():
                tail = log.read_text(encoding="utf-8", errors="replace")[-6000:]
                raise RunError(f"{system.name}: {tail}")
            report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return report

    def close(self) -> None:
        """End the warm process."""
        self._process.communicate(timeout=30)

    def _ask(self, paths: list[str], timeout: float) -> None:
        """Have one engine forked and wait until its process has ended."""
        requests, replies = self._process.stdin, self._process.stdout
        if requests is None or replies is None or self._process.poll() is not None:
            raise RunError(f"no warm process: {self._log.read_text()[-6000:]}")
        requests.write(json.dumps(paths) + "\n")
        requests.flush()
        child = replies.readline()
        if child and not select([replies], [], [], timeout)[0]:
            os.killpg(int(child), signal.SIGKILL)
        if not replies.readline():
            raise RunError(f"no warm process: {self._log.read_text()[-6000:]}")


def serve(requests: Iterable[str]) -> None:
    """Fork a child for every line, [job, out, log]; print its id, then its status."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    for line in requests:
        child = os.fork()
        if child == 0:
            _answer(*json.loads(line))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


def _answer(job: str, out: str, log: str) -> None:
    """Be one engine, in a process group of its own; does not return."""
    status = 1
    try:
        os.setpgid(0, 0)
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        multiprocessing.set_start_method("fork", force=True)
        # SGLang asks for "spawn", which would import everything again.
        multiprocessing.set_start_method = lambda *args, **more: None  # type: ignore[method-assign,assignment]
        environment = json.loads(Path(job).read_text(encoding="utf-8"))["environment"]
        sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        sys.argv = ["lossless.answer", job, out]
        from lossless.answer import main

        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    began = time.perf_counter()
    serve(sys.stdin)
