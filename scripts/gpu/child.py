"""Runs a part in a process group of its own and leaves none of its processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POLL_SECONDS = 0.2
GRACE_SECONDS = 15.0
"""Between asking a part to end and making it."""

Process = tuple[int, int]
"""Process id, and when it started: ids are used again."""


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    seconds: float,
    grace: float = GRACE_SECONDS,
) -> int | None:
    """Run a command until it ends or its time is up.

    Servers it starts are in sessions of their own, so killing its group would leave
    them: every process that was ever below it is remembered, and ended with it.

    Args:
        command: What to run.
        environment: Variables beyond this process's.
        log: File for what it prints; what is there stays.
        seconds: Most it may take.
        grace: Seconds it gets to end by itself after that.

    Returns:
        Its exit status; None where its time was up.
    """
    seen: set[Process] = set()
    deadline = time.monotonic() + seconds
    with log.open("a", encoding="utf-8") as stream:
        child = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        while child.poll() is None and time.monotonic() < deadline:
            seen |= below(child.pid)
            time.sleep(POLL_SECONDS)
        status = child.poll()
        if status is None:
            _signal_group(child.pid, signal.SIGTERM)
            _wait(child, seen, grace)
    finally:
        _sweep(child, seen)
    return status


def below(pid: int) -> set[Process]:
    """Return a process and all that descend from it now."""
    parents: dict[int, list[Process]] = {}
    started: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _fields(int(folder.name))):
            own = int(folder.name)
            started[own] = int(fields[19])
            parents.setdefault(int(fields[1]), []).append((own, started[own]))
    found: set[Process] = set()
    open_ = [(pid, started[pid])] if pid in started else []
    while open_:
        process = open_.pop()
        found.add(process)
        open_ += parents.get(process[0], [])
    return found


def is_alive(process: Process) -> bool:
    """Say whether a process runs; one that waits to be collected does not."""
    fields = _fields(process[0])
    return bool(fields) and fields[0] != "Z" and int(fields[19]) == process[1]


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name; empty: it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _wait(child: subprocess.Popen[bytes], seen: set[Process], grace: float) -> None:
    deadline = time.monotonic() + grace
    while child.poll() is None and time.monotonic() < deadline:
        seen |= below(child.pid)
        time.sleep(POLL_SECONDS)


def _sweep(child: subprocess.Popen[bytes], seen: set[Process]) -> None:
    """End what is left of a part: itself, its group, and what it has started."""
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGKILL)
    while alive := {process for process in seen if is_alive(process)}:
        for pid, _ in alive:
            seen |= below(pid)
        for process in filter(is_alive, seen):
            with suppress(ProcessLookupError):
                os.kill(process[0], signal.SIGKILL)
        time.sleep(POLL_SECONDS / 4)
    child.wait(60)


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
