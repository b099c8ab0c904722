"""The demonstrations as a user runs them, on short documents."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.extended
@pytest.mark.sglang
@pytest.mark.server
def test_the_demo_shows_the_point(tmp_path):
    command = [sys.executable, ROOT / "scripts/serve_demo.py", "--once"]
    # Of six answers on compressed KV three are wrong, of the first three one is.
    sizes = ["--prompt-tokens", "3000", "--requests", "6", "--calls", "4"]
    ended = subprocess.run(
        [*command, *sizes, "--png", tmp_path / "demo.png"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same = dict(re.findall(r"│ ([\w ]+?) +│.*│ +(\d) of 6 │ +\d of 6 │", ended.stdout))
    assert same["full KV"] == same["VeriCache"] == "6"
    assert int(same["compressed KV alone"]) < 6
    assert "compressed KV alone (WRONG):" in ended.stdout
    assert "(not " in ended.stdout
    assert (tmp_path / "demo.png").stat().st_size


@pytest.mark.extended
@pytest.mark.sglang
@pytest.mark.server
def test_two_pools_give_the_answers_of_plain_sglang():
    command = [ROOT / "scripts/serve_two_pools.sh", "--once", "--port", "0"]
    command += ["--requests", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("equal to plain SGLang") == 2
    stored = re.search(r"took (\d+) tokens of the document", ended.stdout)[1]
    assert int(stored) > 2000
