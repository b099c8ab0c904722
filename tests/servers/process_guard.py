"""Ends every process that a test run has started, however the run itself ends.

Servers are in sessions of their own, and their parents may be gone: a process is known
by a variable in its environment. ``process_guard.py MARK PID`` waits for the end of the
process PID, or for a line of input, and ends what carries the mark then. SGLang's
schedulers and detokenizers overwrite what the kernel shows of their environment; they
end with their parent.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "VERICACHE_TEST_RUN"


class ProcessGuard:
    """Marks what this process starts from now on, and ends it with this process."""

    def __init__(self):
        mark = os.environ[VARIABLE] = f"{os.getpid()}-{time.time_ns()}"
        self._process = subprocess.Popen(
            [sys.executable, __file__, mark, str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self):
        """End what is left now."""
        self._process.communicate(b"\n")


def marked(mark):
    """Return the processes with this mark, {process id: command line}; not this one."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):  # it has ended, or is another user's
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    found[int(folder.name)] = b" ".join(words).decode(errors="replace")
    return found


def end(mark):
    """Kill the processes with this mark until none is left, and name them."""
    named = set()
    while found := marked(mark):
        for pid, command in found.items():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if pid not in named:
                print(
                    f"ended a process of the tests: {pid} {command[:200]}", flush=True
                )
        named.update(found)
        time.sleep(0.05)


def main(mark, pid):
    with suppress(ProcessLookupError):
        select.select([sys.stdin, os.pidfd_open(int(pid))], [], [])
    end(mark)


if __name__ == "__main__":
    main(*sys.argv[1:])
