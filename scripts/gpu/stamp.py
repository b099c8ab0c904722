"""What a result is of: commit, source, device; and the rest of where it comes from."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from gpu.part import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from gpu.part import Context

MEASURED = ("vericache_sglang", "kernels", "patches", "scripts/gpu", "tests/kernels")
"""Folders whose Python files decide what is measured."""

PACKAGES = ("vericache-sglang", "sglang", "sglang-kernel", "torch", "triton")

COMMIT = "COMMIT"
"""Name of the file that says the commit where ``.git`` is not carried."""

COMMIT_VARIABLE = "VERICACHE_COMMIT"


def identity(context: Context) -> dict[str, str]:
    """Return what two results must share to be of the same thing.

    Returns:
        ``source``, a digest of the code, equal for equal code whatever the commit is
        called; and ``device``.
    """
    return {"source": source_digest(), "device": device_name(context)}


def stamp(context: Context, argv: list[str]) -> dict[str, Any]:
    """Return the identity and everything else a file of results says of itself.

    Args:
        context: See there.
        argv: The command line, without the interpreter.
    """
    return {
        **identity(context),
        "commit": commit(context),
        "argv": argv,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "label": context.label,
        "hardware": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "memory_gb": _memory_gb(),
            "gpus": gpus("name,memory.total,driver_version,clocks.max.sm,power.limit"),
        },
        "versions": {"python": platform.python_version()},
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages this process can import."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit(context: Context) -> str:
    """Return the commit: of git, else of the environment, else of a carried file."""
    named = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    if named and (ROOT / ".git").exists():
        return named
    if os.environ.get(COMMIT_VARIABLE):
        return os.environ[COMMIT_VARIABLE]
    for folder in filter(None, (ROOT, context.wheels)):
        for file in (folder / COMMIT, folder.parent / COMMIT):
            if file.is_file():
                return file.read_text(encoding="utf-8").strip()
    return "unknown"


def source_digest(root: Path = ROOT) -> str:
    """Return a digest of every Python file under ``MEASURED``."""
    digest = hashlib.sha256()
    for folder in MEASURED:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def device_name(context: Context) -> str:
    """Return the name of the first GPU, or of the CPU in a rehearsal."""
    if context.rehearsal:
        return f"CPU {cpu_name()}"
    return next(iter(gpus("name")), "no GPU")


def cpu_name() -> str:
    """Return what the CPU calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            named = [line for line in lines if line.startswith("model name")]
        return named[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return platform.machine()


def gpus(fields: str) -> list[str]:
    """Return what the driver says of each GPU; empty without one."""
    return _output(
        "nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"
    ).splitlines()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no such program
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _memory_gb() -> float:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return round(pages / 1e9, 1)
