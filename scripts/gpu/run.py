"""Checks and measures on a host with a CUDA device, one part a command.

    python scripts/gpu/run.py install --kit KIT       # packages that were carried
    python scripts/gpu/run.py boot                    # about five minutes
    python scripts/gpu/run.py boot --jobs 5           # servers share the device
    python scripts/gpu/run.py lossless
    python scripts/gpu/run.py throughput
    python scripts/gpu/run.py boot --device cpu       # a rehearsal at toy sizes

Needs no network. Each check writes OUT/PART/CHECK.json, has a time limit of its own and
does not depend on the others; a command that is repeated goes on behind the last check
that ended, whatever ended the command. Everything it starts ends with it. It prints a
table, and OUT/PART.md and OUT/PART.json have all of it. Results of other code, another
device, other packages or flags are measured again. Exit status: 0 all checks passed,
1 some failed, 2 wrong command line or nothing to serve with, 3 time was up.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import processes, stack
from gpu.check import ROOT, Context, environment
from gpu.results import FAILED, Results, log_end, source_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu.check import Check

PARTS = "gpu.parts"
"""Package of the parts: each module has ``checks``."""

NAMES = ("boot", "lossless", "throughput")
INSTALL = "install"


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("part", choices=(*NAMES, INSTALL), help="what to run")
    add("--kit", type=Path, metavar="KIT", help="archive of packages to unpack first")
    add("--out", type=Path, default=Path("gpu-results"), metavar="DIR")
    site = Path(tempfile.gettempdir()) / "vericache-site"
    add("--site", type=Path, default=site, metavar="DIR", help="gets the packages")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses")
    add("--minutes", type=float, default=9.5, help="ends after them; default: 9.5")
    add("--jobs", type=int, default=1, metavar="N", help="checks at once; default: 1")
    add("--engine", default="", metavar="FLAGS", help="for every server, quoted")
    options = parser.parse_args(argv)
    if options.minutes <= 0:
        parser.error("--minutes must be > 0")
    if options.jobs < 1:
        parser.error("--jobs must be >= 1")
    if options.jobs > 1 and options.part == "throughput":
        parser.error("--jobs: throughput is measured one server at a time")
    if options.site.resolve().is_relative_to(ROOT):
        parser.error(f"--site {options.site} is inside the repository")
    if options.part == INSTALL and not options.kit:
        parser.error("install: --kit is needed")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part; see the module for the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = arguments(given)
    deadline = time.time() + options.minutes * 60
    site, out = options.site.resolve(), options.out.resolve()
    try:
        if options.kit:
            stack.install(options.kit.resolve(), site)
        stack.complete(site)
        found = stack.describe(site, options.device)
    except stack.StackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{found['device']}; {found['name']}", flush=True)
    if options.part == INSTALL:
        print(found["fa3_error"])
        return 0
    context = Context(
        device=options.device,
        out=str(out),
        site=str(site),
        engine=shlex.split(options.engine),
        stack=found,
        argv=given,
        source=source_digest(),
    )
    return run_part(options.part, context, deadline, options.jobs)


def run_part(name: str, context: Context, deadline: float, jobs: int = 1) -> int:
    """Run what is left of a part and print its table.

    Args:
        context: See there.
        deadline: ``time.time()`` seconds; what runs then is ended, and runs again next.
        jobs: How many checks may run at once.
    """
    checks = importlib.import_module(f"{PARTS}.{name}").checks(context)
    results = Results(context, name, checks)
    mark = f"{uuid.uuid4().hex}/"
    guard = processes.guard(mark)

    def run_one(check: Check) -> None:
        # Most checks take less than half of what they may.
        if time.time() + check.seconds / 2 <= deadline:
            print(f"{check.name}: {check.about} ...", flush=True)
            run_check(check, results, mark, deadline)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(run_one, results.left()))
        finally:
            guard.communicate()
    print(results.publish())
    states = [results.read(check.name).get("status") for check in checks]
    if None in states:
        print("not finished: repeat the command", file=sys.stderr)
        return 3
    return 1 if FAILED in states else 0


def run_check(check: Check, results: Results, mark: str, deadline: float) -> None:
    """Run a check in a process of its own, and end all that it has started."""
    mark = f"{mark}{check.name}/"
    context, log = results.context, results.folder / f"{check.name}.job.log"
    command = [sys.executable, "-m", "gpu.job", f"{PARTS}.{results.part}", check.name]
    variables = {**environment(context.site), processes.VARIABLE: mark}
    results.begin(check)
    began = time.time()
    with log.open("w", encoding="utf-8") as stream:
        job = subprocess.Popen(
            [*command, context.to_json()],
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    end = min(began + check.seconds, deadline)
    try:
        status = job.wait(max(0.0, end - began))
        error = f"its process ended with status {status} and without a result"
    except subprocess.TimeoutExpired:
        error = f"no result after {check.seconds:g} s"
        if end == deadline:
            return  # it runs again next time
    finally:
        processes.end(mark)
        job.wait()
    if "status" not in results.read(check.name):
        outcome = {"status": FAILED, "error": error, "traceback": log_end(log)}
        results.end(check, {**outcome, "log": log_end(results.server_log(check.name))})


if __name__ == "__main__":
    sys.exit(main())
