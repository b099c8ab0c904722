"""A verifier, a drafter behind a proxy, and plain SGLang."""

import sys
from pathlib import Path

import pytest

from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

sys.path.insert(0, str(Path(__file__).parent))

from live_pair import BOTH
from live_server import MODEL, LiveServer


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Return plain SGLang's server."""
    server = LiveServer(tmp_path_factory.mktemp("plain"), "--disable-vericache", *BOTH)
    try:
        yield server.wait()
    finally:
        server.close()


@pytest.fixture(scope="session")
def prompts():
    """Return prompts of 300 to 1,200 tokens."""
    return record_prompts(load_tokenizer(MODEL), [300, 700, 1200, 500], 23)


@pytest.fixture(scope="session")
def documents():
    """Return prompts of 2 to 5 whole segments."""
    return record_prompts(load_tokenizer(MODEL), [2700, 1100, 1700, 2300], 5)
