"""SGLang's cache-consistency jitter test: reused contexts give the same answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_server import PATHS, SERVERS

pytestmark = [pytest.mark.server, pytest.mark.extended]

SETTINGS = {
    "min_prompt": 1,
    "draft_length": 8,
    "residency": "host",
    "recent_tokens": 8,
}
POOL = 1800
"""Slots for about five of the twelve requests of 240 to 400 tokens."""


def test_contexts_reused_under_retraction_give_the_same_tokens(tmp_path):
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("jitter_run.py")), str(POOL)],
        env={
            **os.environ,
            **SERVERS,
            "PYTHONPATH": PATHS,
            "PROMETHEUS_MULTIPROC_DIR": str(metrics),
            "VERICACHE_CONFIG": json.dumps(SETTINGS),
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    counters = json.loads(lines[-1])
    assert counters["verify_rows"] > 100, counters
