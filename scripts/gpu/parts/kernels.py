"""The tests of the kernels on the device: a file a step."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu.part import ROOT, Check, Step, Summary, Table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gpu.part import Context

TESTS = ROOT / "tests" / "kernels"

REHEARSED = "test_split_segment.py"
"""The file of a rehearsal: it runs a kernel in the interpreter."""

DEVICE = "VERICACHE_KERNEL_DEVICE"
"""Switch of the tests (tests/kernels/kernel_device.py): "cuda" forbids to interpret."""

INTERPRET = "TRITON_INTERPRET"


def steps(context: Context) -> list[Step]:
    """See ``gpu.part.PartModule``."""
    files = sorted(TESTS.glob("test_*.py"))
    if context.rehearsal:
        files = [TESTS / REHEARSED]
    return [Step(file.name, partial(tested, context, file), 90) for file in files]


def tested(context: Context, file: Path) -> dict[str, Any]:
    """Run a file of tests; returns how many passed, and the names of the others.

    Raises:
        RuntimeError: pytest wrote no report.
    """
    report = context.out / f"{file.stem}.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, **context.environment()}
    for name in (DEVICE, INTERPRET):
        environment.pop(name, None)
    if not context.rehearsal:
        environment[DEVICE] = "cuda"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", f"--junitxml={report}", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    try:
        return counted(report)
    except OSError:
        raise RuntimeError(f"pytest: {(done.stdout + done.stderr)[-1500:]}") from None


def counted(report: Path) -> dict[str, Any]:
    """Count the cases of a JUnit report.

    Raises:
        OSError: There is none.
    """
    passed, failed, skipped = 0, [], []
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "?")
        bad = case.find("failure")
        bad = case.find("error") if bad is None else bad
        if bad is not None:
            failed.append(f"{name}: {bad.get('message', '')[:300]}")
        elif (why := case.find("skipped")) is not None:
            skipped.append(f"{name}: {why.get('message', '')[:200]}")
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped}


def conclude(context: Context, results: Mapping[str, Any]) -> Summary:
    """See ``gpu.part.PartModule``."""
    counts = {
        key: sum(len(one.get(key, ())) for one in results.values())
        for key in ("failed", "skipped")
    }
    passed = sum(one.get("passed", 0) for one in results.values())
    got = f"{passed} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    rows = [
        (
            name,
            str(one.get("passed", "-")),
            "; ".join(one.get("failed", [one.get("error", "")])),
            "; ".join(one.get("skipped", ())),
            f"{one.get('seconds', 0):.0f} s",
        )
        for name, one in results.items()
    ]
    columns = ("file", "passed", "failed", "skipped", "took")
    where = "in the interpreter" if context.rehearsal else "on the device"
    return Summary(
        headline=f"{got}, {where}",
        checks=(
            Check(
                "no test fails", "0 failed", got, passed > 0 and not counts["failed"]
            ),
        ),
        tables=(Table(f"Tests {where}", columns, tuple(rows)),),
    )
