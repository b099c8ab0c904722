"""Settings of every test process, and which tests come first."""

import os
from pathlib import Path

from hypothesis import settings

# A second thread spins at every barrier on a busy small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says nothing on a busy machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

LONGEST = ("lossless", "faults", "end_to_end/kits", "end_to_end")
"""Folders whose tests start servers: begun first, so that no process ends up alone."""


def pytest_collection_modifyitems(items):
    """Begin with the longest files; the order inside a file stays."""
    items.sort(key=_turn)


def _turn(item):
    folder = item.path.relative_to(Path(__file__).parent).parent.as_posix()
    return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)
