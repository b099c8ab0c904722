"""Lets the tests of this folder import what they share."""

import sys
from pathlib import Path

import pytest

from vericache_sglang.prefix_cache.store import stored_segments

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def segments_are_waited_for(monkeypatch):
    """A busy machine is slow; tests with a clock of their own know the limit."""
    monkeypatch.setattr(stored_segments, "LONGEST_S", 600.0)
