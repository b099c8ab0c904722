"""A check in its own process: ``python -m gpu.job MODULE CHECK CONTEXT``."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from gpu.check import Context, NotMetError, shared_flags
from gpu.results import FAILED, LINES, OK, Results, log_end
from vericache_sglang.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.server import OwnServer

BOOT_SECONDS = 240.0


class Job:
    """A check that runs. Its servers end with its process: the command sees to that.

    Attributes:
        context: See there.
        results: Of its part; what was found before may be read there.
        name: The check's name.
        log: What its server prints.
        attention: The backend its server said it uses.
        figures: What is measured, as plain values; ``rows`` (title -> cell) are shown
            in the part's table.
    """

    def __init__(self, results: Results, name: str) -> None:
        self.context = results.context
        self.results = results
        self.name = name
        self.log = results.server_log(name)
        self.attention = ""
        self.figures: dict[str, Any] = {}

    def serve(self, model: Path, flags: Sequence[str]) -> OwnServer:
        """Serve a model and wait until the server answers.

        Args:
            flags: Of ``launch_server``, after those of every server.

        Raises:
            ServerError: It does not start; says how its log ends.
        """
        from vericache_sglang.evaluation.fleet import starter
        from vericache_sglang.evaluation.server import OwnServer, free_port
        from vericache_sglang.evaluation.systems import System, command

        port, system = free_port(), System(name="", about="", flags=tuple(flags))
        words = command(system, str(model), port, shared_flags(self.context), ())
        server = OwnServer(words, port, {}, self.log, starter())
        server.wait(BOOT_SECONDS)
        self.attention = str(server.info().get("attention_backend"))
        return server

    def found(self, name: str, key: str) -> Any:
        """Return a figure of another check of the part, which may run at the same time.

        Returns:
            None where that check has none, and for this check.
        """
        if name == self.name:
            return None
        found = self.results.finished(name, run=os.getppid())
        return found.get("figures", {}).get(key)


def main(module: str, name: str, text: str) -> None:
    """Run a check and write what came of it."""
    context = Context(**json.loads(text))
    checks = importlib.import_module(module).checks(context)
    results = Results(context, module.rpartition(".")[2], checks)
    check = next(check for check in checks if check.name == name)
    faulthandler.dump_traceback_later(check.seconds - 5)  # where it hung
    program = "python scripts/gpu/run.py"
    origin = {**provenance(context.argv, program), "stack": context.stack}
    job = Job(results, name)
    outcome: dict[str, Any] = {"status": OK}
    try:
        check.run(job)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        traceback.print_exc()
        outcome = {"status": FAILED, "error": f"{error}"[:2000]}
        if not isinstance(error, NotMetError):
            outcome["error"] = f"{type(error).__name__}: {error}"[:2000]
            outcome["traceback"] = traceback.format_exc().splitlines()[-LINES:]
            outcome["log"] = log_end(job.log)
    outcome |= {"figures": job.figures, "attention": job.attention}
    results.end(check, {**outcome, "origin": origin})


if __name__ == "__main__":
    main(*sys.argv[1:])
