"""Lets the tests of this folder import what they share, also with the store's."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDERS = (HERE, HERE.parent / "simulated", HERE.parent / "prefix_cache" / "store")
sys.path[:0] = map(str, FOLDERS)


@pytest.fixture(autouse=True)
def slow_compressors_are_waited_for(monkeypatch):
    """On a busy machine a compressor is slow; it hangs in tests/compression only."""
    monkeypatch.setattr("vericache_sglang.compression.guard.LONGEST_S", 600.0)
