"""However a test run ends, the servers it has started end too."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from process_guard import VARIABLE, ProcessGuard

ROOT = Path(__file__).parents[2]
PYTEST = (
    *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
    *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)),
)
HANGS = str(Path(__file__).parent / "hanging_run.py")


def script(folder):
    """Return scripts/test.sh in a folder whose environment is the one we run in."""
    (folder / "scripts").mkdir()
    (folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test.sh", folder / "scripts")
    lines = {"scripts/setup_env.sh": "true"}
    lines |= {f".venv/bin/{name}": "true" for name in ("ruff", "mypy")}
    lines[".venv/bin/python"] = f'exec {sys.executable} "$@"'
    for name, line in lines.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / name).chmod(0o755)
    return ("bash", str(folder / "scripts" / "test.sh"), *PYTEST[3:])


@pytest.mark.extended
@pytest.mark.server
@pytest.mark.parametrize(
    ("what", "number", "started"),
    [
        ("pytest", signal.SIGKILL, "processes"),
        pytest.param(
            "scripts/test.sh", signal.SIGINT, "servers", marks=pytest.mark.extended
        ),
    ],
)
def test_an_ended_run_leaves_no_process(what, number, started, tmp_path):
    """What it has started are sessions of their own: its own group is not enough."""
    command = script(tmp_path) if what == "scripts/test.sh" else PYTEST
    hangs, log = tmp_path / "hangs", tmp_path / "log"
    with log.open("w") as stream:
        run = subprocess.Popen(
            [*command, f"{HANGS}::test_with_{started}"],
            env={**os.environ, "VERICACHE_TEST_HANGS": str(hangs)},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A job in the background ignores interrupts, and so would what it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    family = [psutil.Process(run.pid)]
    try:
        deadline = time.monotonic() + 300
        while not hangs.exists():
            assert run.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.1)
        family += family[0].children(recursive=True)
        assert len(family) >= 4, "pytest, the fork server, and two more"
        os.killpg(run.pid, number)
        assert run.wait(240) != 0
        _, alive = psutil.wait_procs(family[1:], timeout=120)
        assert alive == [], log.read_text()[-4000:]
    finally:
        for process in family:
            if process.is_running():
                process.kill()


def test_the_guard_ends_what_carries_its_mark_and_names_it(monkeypatch, capfd):
    monkeypatch.setenv(VARIABLE, "another")
    code = [sys.executable, "-c", "import time; time.sleep(600)"]
    other = subprocess.Popen(code)
    guard = ProcessGuard()
    left = subprocess.Popen(code, start_new_session=True)
    try:
        guard.close()
        assert left.wait(60) == -signal.SIGKILL
        assert other.poll() is None
        assert f"{left.pid} {sys.executable} -c import" in capfd.readouterr().out
    finally:
        other.kill()
        other.wait()
