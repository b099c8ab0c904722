"""One server of ours and one of plain SGLang for every test of this folder."""

import sys
from pathlib import Path

import pytest

from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

sys.path.insert(0, str(Path(__file__).parent))

from live_server import MODEL, LiveServer

BOTH = (
    *("--max-total-tokens", "30000", "--enable-metrics"),
    *("--enable-custom-logit-processor", "--enable-deterministic-inference"),
    # llama3 reads the demo model's bare JSON calls; the other one waits to be asked.
    *("--tool-call-parser", "llama3", "--reasoning-parser", "deepseek-v3"),
    "--constrained-json-disable-any-whitespace",
)
"""Flags of both servers: everything a test of this folder asks of SGLang itself."""

OURS = (
    *("--vericache-min-prompt", "64", "--vericache-draft-length", "8"),
    *("--vericache-residency", "host"),
)
"""Short prompts are drafted for too, and their complements leave the device."""


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    """Return (ours, plain); they sleep while no test asks them anything."""
    folder = tmp_path_factory.mktemp("servers")
    trace = ("--vericache-trace", str(folder / "trace"))
    pair = (
        LiveServer(folder, *OURS, *trace, *BOTH),
        LiveServer(folder, "--disable-vericache", *BOTH),
    )
    try:
        yield pair[0].wait(), pair[1].wait()
    finally:
        for server in pair:
            server.close()


@pytest.fixture(scope="session")
def prompts():
    """Return prompts of 300 to 2,000 tokens."""
    return record_prompts(load_tokenizer(MODEL), [300, 700, 1200, 2000, 500, 900], 11)
