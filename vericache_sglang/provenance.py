"""Provenance of results: command line, commit, versions, hardware."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGES = ("vericache-sglang", "sglang", "torch", "transformers", "triton", "aiohttp")


def provenance(argv: Sequence[str], program: str) -> dict[str, Any]:
    """Return the provenance entries of a results file.

    Without a ``.git`` folder the commit is read from ``VERICACHE_COMMIT``.

    Args:
        argv: The command line, without the program.
        program: Program as it appears in the command line.
    """
    here = str(Path(__file__).parent)
    commit = os.environ.get("VERICACHE_COMMIT", "")
    commit = commit or _output("git", "-C", here, "describe", "--always", "--dirty")
    return {
        "argv": list(argv),
        "command": f"{program} {shlex.join(argv)}",
        "commit": commit or "not in a git checkout",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_gb": _memory_gb(),
            # A load above the number of cores: other programs affected the timings.
            "load_average": round(os.getloadavg()[0], 1),
            "omp_threads": os.environ.get("OMP_NUM_THREADS", "not set"),
            "gpus": _gpus(),
        },
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _gpus() -> list[str]:
    query = "--query-gpu=name,memory.total,driver_version"
    return _output("nvidia-smi", query, "--format=csv,noheader").splitlines()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no such program
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gb() -> float:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return round(pages / 1e9, 1)
