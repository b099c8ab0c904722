"""A part in a process of its own: ``python -m gpu.work PART CONTEXT ARGV AGAIN``."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import time
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gpu import journal, stamp
from gpu.part import Context
from gpu.parts import PARTS, module_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu.part import Part, Step, Summary

SPARE_SECONDS = 15.0
"""Kept of a part's time for stopping servers and writing."""


def main(argv: Sequence[str]) -> int:
    """Run the steps that are left, as many as there is time for.

    Returns:
        0; what came of it is in the part's file.
    """
    began = time.monotonic()
    part = PARTS[argv[0]]
    context = Context.from_json(argv[1])
    signal.signal(signal.SIGTERM, _end)  # servers are stopped on the way out
    record = stamp.stamp(context, json.loads(argv[2]))
    record["versions"] = stamp.versions()
    notes = journal.Journal(
        journal.file_of(context.out, part.name), record, again=argv[3] == "again"
    )
    missing = lacks(part, context)
    if missing:
        notes.save(status="skipped", error=missing)
        return 0
    notes.save()
    module = module_of(part)
    steps = {step.name: step for step in module.steps(context)}
    before = notes.content["seconds"]
    limit = began + context.minutes * 60 - SPARE_SECONDS
    whole = run(notes, steps, limit)
    shown = {name: notes.steps[name] for name in steps if name in notes.steps}
    summary = module.conclude(context, shown)
    notes.save(
        seconds=before + time.monotonic() - began,
        status=status_of(shown, summary) if whole else "unfinished",
        error=first_error(shown),
        done=f"{len(shown)} of {len(steps)} steps",
        **asdict(summary) | {"label": joined(context.label, summary.label)},
    )
    return 0


def lacks(part: Part, context: Context) -> str:
    """Say what a part needs and does not have; "" for nothing."""
    if context.rehearsal and not part.rehearses:
        return "makes no sense on a CPU"
    absent = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if "torch" in part.needs and not context.rehearsal:
        import torch

        if not torch.cuda.is_available():
            return "no CUDA device; --device cpu rehearses"
    return ""


def run(notes: journal.Journal, steps: dict[str, Step], limit: float) -> bool:
    """Run steps until all are done or the next one would not end in time.

    Args:
        notes: Gets what comes of each; a step that fails is not the end.
        steps: By name.
        limit: ``time.monotonic()`` seconds.

    Returns:
        Whether none is left.
    """
    for count, name in enumerate(notes.left(list(steps))):
        step = steps[name]
        if count and time.monotonic() + step.seconds > limit:
            print(f"no time left for {name}", flush=True)
            return False
        print(f"== {name}", flush=True)
        notes.begin(name)
        began = time.monotonic()
        try:
            result = step.run()
        except Exception as error:  # noqa: BLE001 - one step must not end the others
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:2000]}
        notes.end(name, {"seconds": round(time.monotonic() - began, 1)} | result)
    return True


def status_of(results: dict[str, dict[str, Any]], summary: Summary) -> str:
    """Return "ok", or "failed" where a step did or a check is not met."""
    bad = first_error(results) or not all(check.passed for check in summary.checks)
    return "failed" if bad else "ok"


def first_error(results: dict[str, dict[str, Any]]) -> str:
    """Return the first step that failed and why; "" for none."""
    failed = [(name, one["error"]) for name, one in results.items() if one.get("error")]
    return f"{failed[0][0]}: {failed[0][1]}" if failed else ""


def joined(*labels: str) -> str:
    """Return what several labels say together."""
    return ". ".join(filter(None, labels))


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
