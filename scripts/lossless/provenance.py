"""What every results file says about where its figures come from, and its writing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any


def provenance(argv: list[str]) -> dict[str, Any]:
    """Return argv, commit, date, hardware and versions."""
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "argv": argv,
        "commit": commit,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "omp_threads": os.environ.get("OMP_NUM_THREADS", "1"),
        },
        "versions": {
            name: version(name) for name in ("sglang", "torch", "vericache-sglang")
        },
    }


def publish(report: dict[str, Any], out: str | None) -> None:
    """Print a report as JSON, and write it to ``out`` where that is given."""
    text = json.dumps(report, indent=2)
    print(text)
    if out:
        Path(out).write_text(text + "\n", encoding="utf-8")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
