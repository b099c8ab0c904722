"""Ends every process a run has started, however the run itself ends.

Servers are in sessions of their own, and their parents may be gone: a process is known
by a variable in its environment. ``processes.py MARK`` waits until its standard input
ends, as it does with the run, killed or not, and ends them then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "VERICACHE_GPU_RUN"


def marked(mark: str) -> list[int]:
    """Return the processes whose mark begins with this one, itself left out."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):  # it has ended, or is another user's
                variables = (folder / "environ").read_bytes().split(b"\0")
                if any(variable.startswith(wanted) for variable in variables):
                    found.append(int(folder.name))
    return found


def end(mark: str) -> None:
    """Kill the processes of a run until none is left, those started meanwhile too."""
    while found := marked(mark):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def guard(mark: str) -> subprocess.Popen[bytes]:
    """Start what ends the processes of a run once this process has ended."""
    command = [sys.executable, __file__, mark]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


if __name__ == "__main__":
    sys.stdin.read()
    end(sys.argv[1])
