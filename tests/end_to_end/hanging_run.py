"""Tests that start something and then hang, for test_process_guard.py to interrupt."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from live_server import LiveServer, fork

from vericache_sglang.evaluation.server import free_port, spawn


def hang():
    Path(os.environ["VERICACHE_TEST_HANGS"]).touch()
    time.sleep(600)


@pytest.fixture
def servers(tmp_path):
    """Return a server that is up, forked, and one that boots."""
    flags = ("--max-total-tokens", "4000", "--disable-vericache")
    pair = LiveServer(tmp_path, *flags), LiveServer(tmp_path, *flags, fresh=True)
    try:
        yield pair[0].wait(), pair[1]
    finally:
        for server in pair:
            server.close()


@pytest.mark.usefixtures("servers")
def test_with_servers():
    hang()


@pytest.fixture
def processes(tmp_path):
    """Start, as servers are started, what serves at once."""
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
    pair = [
        start([*command, str(free_port())], {}, tmp_path / start.__name__)
        for start in (spawn, fork)
    ]
    yield pair
    for process in pair:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


def test_with_processes(processes):
    assert [process.poll() for process in processes] == [None, None]
    hang()
