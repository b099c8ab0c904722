"""Settings of every test process, and which tests come first."""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from process_guard import ProcessGuard
from xdist.scheduler import LoadFileScheduling

# A second thread spins at every barrier on a busy small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says nothing on a busy machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

LONGEST = ("lossless", "faults", "end_to_end/kits", "end_to_end")
"""Folders whose tests start servers: begun first, so that no process ends up alone."""


OWN_SERVERS = (
    *("cached_prefixes", "consistency_check", "demo", "drain", "lifecycle"),
    "process_guard",
)
"""Files of end_to_end that do not ask the two servers which the others share."""


class OneProcessPerServer(LoadFileScheduling):
    """The tests of a file run in one process, and those that share servers too."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        folder, _, name = file.rpartition("/")
        own = name.removeprefix("test_").removesuffix(".py") in OWN_SERVERS
        return file if own or folder != "tests/end_to_end" else folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Schedule by servers, whatever ``--dist`` says."""
    return OneProcessPerServer(config, log)


def pytest_configure(config):
    """Have what the tests start end with this process, which may be interrupted."""
    if not hasattr(config, "workerinput"):  # the processes of xdist are started by it
        config.add_cleanup(ProcessGuard().close)


def pytest_collection_modifyitems(items):
    """Begin with the longest files; the order inside a file stays."""
    items.sort(key=_turn)


def _turn(item):
    folder = item.path.relative_to(Path(__file__).parent).parent.as_posix()
    return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)
