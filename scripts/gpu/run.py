"""Everything there is to check and to measure on a host with a CUDA device.

    python scripts/gpu/run.py --wheels DIR            # every part, resumed by repeating
    python scripts/gpu/run.py --parts kernels,floors  # torch and Triton are enough
    python scripts/gpu/run.py --device cpu            # a rehearsal at toy sizes
    python scripts/gpu/collect.py                     # the parts in one results file

Needs no network. A part writes OUT/PART.json after every step and is killed, with every
process it has started, when its minutes are over; run again, it goes on behind the last
step that ended. A part that is over is not repeated on the same code and device unless
``--again`` names it. Where a command may only run so long, put ``timeout 590`` in front
and repeat it. The last lines are a table of the parts; the exit status is 0 once
every part that was asked for is ok.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import child, journal, stamp
from gpu.pages import text_table
from gpu.part import ROOT, Context, Part
from gpu.parts import PARTS, module_of

OUT = Path("gpu-results")


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="with commas between; default: all")
    add("--again", default="", metavar="PARTS", help="parts to begin anew")
    add("--wheels", type=Path, metavar="DIR", help="wheels, or folders of them")
    add("--out", type=Path, default=OUT, metavar="DIR", help=f"default: {OUT}")
    add(
        "--site",
        type=Path,
        default=Path(tempfile.gettempdir()) / "vericache-site",
        metavar="DIR",
        help="where carried wheels are installed, outside the repository",
    )
    add("--minutes", type=float, default=8.0, help="most for a part; default: 8")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses")
    add(
        "--attention-backend",
        default="vericache",
        metavar="NAME",
        help="of servers that draft, and of plain ones compared token by token",
    )
    add(
        "--plain-backend",
        default="triton",
        metavar="NAME",
        help="of plain SGLang where speed is compared",
    )
    return parser.parse_args(argv)


def chosen(names: str) -> list[Part]:
    """Return the parts of a list, in their own order.

    Raises:
        SystemExit: A name is unknown.
    """
    wanted = [name for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in PARTS]:
        sys.exit(f"no part is called {unknown[0]}; parts: {', '.join(PARTS)}")
    return [part for name, part in PARTS.items() if name in wanted]


def context_of(options: argparse.Namespace) -> Context:
    """Return what the parts are told.

    Raises:
        SystemExit: A folder or the limit makes no sense.
    """
    site = options.site.resolve()
    if site.is_relative_to(ROOT):
        sys.exit(f"--site {site} is inside the repository")
    if options.wheels and not options.wheels.is_dir():
        sys.exit(f"--wheels {options.wheels} is no folder")
    if options.minutes <= 0:
        sys.exit("--minutes must be > 0")
    on_cpu = options.device == "cpu"
    return Context(
        device=options.device,
        out=options.out.resolve(),
        site=site,
        wheels=options.wheels and options.wheels.resolve(),
        minutes=options.minutes,
        backend="" if on_cpu else options.attention_backend,
        plain_backend="" if on_cpu else options.plain_backend,
    )


def run_part(part: Part, context: Context, argv: list[str], *, again: bool) -> None:
    """Run what is left of a part, in a process of its own, within its minutes."""
    file = journal.file_of(context.out, part.name)
    command = [sys.executable, "-m", "gpu.work", part.name, context.to_json()]
    command += [json.dumps(argv), "again" if again else "resume"]
    log = file.with_suffix(".log")
    began = time.monotonic()
    status = child.run(command, context.environment(), log, context.minutes * 60)
    found = journal.read(file)
    if status == 0 and found.get("status") != journal.UNDER_WAY:
        return
    told = f"killed after {context.minutes:g} minutes"
    if status is not None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = f"ended with status {status}: {' | '.join(lines[-3:])}"[:1000]
    if not found.get("stamp"):  # it did not even get to write
        found = {"part": part.name, "stamp": stamp.stamp(context, argv), "steps": {}}
    spent = found.get("seconds", 0.0) + time.monotonic() - began
    state = "killed" if status is None else "failed"
    found |= {"status": state, "error": told, "seconds": spent, "label": context.label}
    journal.write(file, found)


def is_over(part: Part, context: Context, identity: dict[str, str]) -> bool:
    """Say whether a part needs no run."""
    names = [step.name for step in module_of(part).steps(context)]
    found = journal.read(journal.file_of(context.out, part.name))
    return journal.is_over(found, identity, names)


def summary(parts: list[Part], context: Context, skipped: set[str]) -> str:
    """Return the table of the parts."""
    rows = []
    for part in parts:
        found = journal.read(journal.file_of(context.out, part.name))
        state = found.get("status", "not run")
        told = found.get("headline", "")
        if state not in ("ok", "failed"):
            told = found.get("error") or found.get("done", "")
        elif state == "failed":
            told = found.get("error") or told
        state += " (before)" if part.name in skipped else ""
        rows.append((part.name, state, f"{found.get('seconds', 0):.0f} s", told[:150]))
    table = text_table(("part", "status", "took", "what came of it"), rows)
    return "\n".join(filter(None, [context.label, table]))


def main(argv: list[str] | None = None) -> int:
    """Run the parts and print the table; 0 where all of them are ok."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = arguments(given)
    parts, again = chosen(options.parts), {part.name for part in chosen(options.again)}
    context = context_of(options)
    context.out.mkdir(parents=True, exist_ok=True)
    identity = stamp.identity(context)
    skipped: set[str] = set()
    for part in parts:
        if part.name not in again and is_over(part, context, identity):
            skipped.add(part.name)
            continue
        print(f"{part.name}: {part.about} (about {part.minutes:g} min) ...", flush=True)
        run_part(part, context, given, again=part.name in again)
    print(summary(parts, context, skipped), flush=True)
    states = [
        journal.read(journal.file_of(context.out, part.name)).get("status")
        for part in parts
    ]
    return 0 if {*states} == {"ok"} else 1


def _end(number: int, _: object) -> None:
    """Leave by the way on which a part and its servers are ended."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
