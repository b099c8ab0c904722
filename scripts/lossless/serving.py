"""A live engine in a child process that answers waves as they are sent to it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from lossless.runs import ENGINE, PATHS, STRICT, RunError, System

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

TOTALS = (
    *("iterations", "mixed_iterations", "draft_rows", "verify_rows", "plain_rows"),
    *("waits", "drafted", "accepted", "rounds", "splits", "joins", "unsplits"),
    *("offloads", "pins", "parks", "resumes", "shared_reloads", "slips"),
    *("staged_bytes", "offloaded_bytes", "stage_seconds", "steps_aside"),
)
"""Counters that only grow, so that a difference means something."""


def _serve(job: dict[str, Any], pipe: Connection) -> None:
    sys.path[:0] = PATHS.split(os.pathsep)
    from lossless.answer import answer, start, state

    engine = start(job)
    pipe.send("ready")
    while (wave := pipe.recv()) is not None:
        before, began = state(engine), time.perf_counter()
        answers = answer(engine, wave)
        seconds = time.perf_counter() - began
        pipe.send((answers, seconds, before, state(engine)))
    engine.shutdown()


class LiveSystem:
    """One engine, kept running; idle engines sleep instead of polling.

    Args:
        system: How to serve.
        model: Folder of the model.
        strict: Keep SGLang's memory checks on; a benchmark turns them off.
    """

    def __init__(self, system: System, model: Path, *, strict: bool = True) -> None:
        self.system = system
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        environment = dict(STRICT)
        if not strict:
            environment = {
                name: "0" if name.startswith("SGLANG") else value
                for name, value in environment.items()
            }
        job = {
            "engine": {
                **ENGINE,
                "model_path": str(model),
                "sleep_on_idle": True,
                **system.engine,
            },
            "settings": system.settings,
            "environment": {**environment, **system.environment},
        }
        self._process = context.Process(target=_serve, args=(job, theirs))
        self._process.start()
        self._state: dict[str, Any] = {}
        theirs.close()
        self._receive()

    def state(self) -> dict[str, Any]:
        """Return VeriCache's counters and estimates as the last wave left them."""
        return self._state

    def answer(
        self, wave: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], float, dict[str, Any]]:
        """Answer a wave.

        Returns:
            The answers, the seconds they took, and what VeriCache's counters grew by.

        Raises:
            RunError: The child has died.
        """
        self._pipe.send(wave)
        answers, seconds, before, after = self._receive()
        self._state = after
        grown = {key: after[key] - before[key] for key in TOTALS if key in after}
        return answers, seconds, grown

    def close(self) -> None:
        """Stop the engine and wait for its processes."""
        self._pipe.send(None)
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise RunError(f"{self.system.name}: the engine has died") from error
