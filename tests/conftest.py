"""Settings of every test process, and which tests come first."""

import atexit
import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from process_guard import ProcessGuard
from xdist.scheduler import LoadFileScheduling

# Its assertions then show in what an answer differs from plain SGLang's.
pytest.register_assert_rewrite("live_pair")

# A second thread spins at every barrier on a busy small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says nothing on a busy machine. Examples follow from the
# test's code, so that two runs of one commit agree; --hypothesis-profile=explore draws
# others.
settings.register_profile("explore", deadline=None, print_blob=True)
settings.register_profile("all", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("usual", settings.get_profile("all"), max_examples=15)

LONGEST = (
    *("lossless", "remote", "faults", "disaggregation", "end_to_end/kits"),
    "end_to_end",
)
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
    gc.disable()  # until all is collected, which allocates and frees little
    if not config.getoption("--hypothesis-profile"):
        usual = "not extended" in config.option.markexpr
        settings.load_profile("usual" if usual else "all")
    if hasattr(config, "workerinput"):
        # An interpreter that ends frees its memory object by object, for half a minute.
        atexit.register(os._exit, 0)
    else:  # it starts the processes of xdist
        config.add_cleanup(ProcessGuard().close)


def pytest_collection_finish():
    """Spare the garbage collector what was imported: millions of objects."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session):
    """Spare it what is left too: pytest collects five times before it ends."""
    if hasattr(session.config, "workerinput"):
        gc.freeze()
    else:
        gc.unfreeze()  # what is frozen as an interpreter ends is reported as leaked


COMPLETE = (
    *("fake_device/", "runtime/test_device_moves.py", "runtime/test_two_streams.py"),
    *("runtime/test_cuda_backend.py", "runtime/test_cuda_arguments.py"),
    *("planning/test_memory.py", "scripts/test_gpu_parts.py"),
)
"""What stands for a GPU until there is one: every combination is tried, always."""


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items):
    """Begin with the longest files; leave combinations of parameters to ``--all``.

    The order inside a file stays. A test with several parameters runs without
    ``--all`` until every value of each has been tried once.
    """
    items.sort(key=_turn)
    tests = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        if not name.removeprefix("tests/").startswith(COMPLETE):
            tests.setdefault(name, []).append(item)
    for rows in tests.values():
        usual = [row for row in rows if not row.get_closest_marker("extended")]
        if len(usual) > 1:
            for row in _repeating(usual):
                row.add_marker(pytest.mark.extended)


def _repeating(rows):
    """Return the rows of one test that try no value which the others do not."""
    values = {row: set(_values(row)) for row in rows}
    missing = set().union(*values.values())
    while missing:
        row = max(values, key=lambda row: len(values[row] & missing))
        missing -= values.pop(row)
    return list(values)


def _values(row):
    """Yield what every parameter of a row is; names given together are one."""
    params = dict(row.callspec.params)
    for mark in row.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        names = tuple(name.strip() for name in names)
        yield names, tuple(id(params.pop(name)) for name in names)
    for name, value in params.items():
        yield name, id(value)


def _turn(item):
    folder = item.path.relative_to(Path(__file__).parent).parent.as_posix()
    return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)


@pytest.fixture(autouse=True)
def slow_compressors_are_waited_for(monkeypatch):
    """A busy machine is slow, not hanging; the guard's own tests set their limit."""
    if guard := sys.modules.get("vericache_sglang.compression.guard"):
        monkeypatch.setattr(guard, "LONGEST_S", 600.0)
