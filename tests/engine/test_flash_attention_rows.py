"""SGLang's own FlashAttention backend on the rows we present, in a process of its own.

The process runs SGLang's metadata code and its page-table kernel, interpreted; only the
attention itself is played (``fa3_rows.py``).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def flash():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("fa3_rows.py"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_flash_attention_says_that_it_serves_ragged_graphs(flash):
    assert flash["serves"] is True


@pytest.mark.parametrize(("way", "replays"), [("graph", 8), ("eager", 0)])
def test_flash_attention_reads_the_rows_we_present(flash, way, replays):
    assert flash[way] < 2e-6
    assert flash[f"{way}-replays"] == replays
