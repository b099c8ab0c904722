"""Types agree in the whole project; what is checked, and how, says pyproject.toml."""

import subprocess
import sys
from pathlib import Path


def test_types_agree():
    done = subprocess.run(
        [sys.executable, "-m", "mypy"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
