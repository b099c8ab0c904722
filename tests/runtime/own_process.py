"""Scripts beside this file that need a process of their own, for what they import."""

import json
import os
import subprocess
import sys
from pathlib import Path


def printed(script):
    """Run a script; return the JSON it prints last."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
