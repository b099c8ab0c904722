"""Servers that are started and stopped, with a small program in SGLang's place."""

import argparse
import os
import signal
import subprocess
import sys
import time

import pytest

from vericache_sglang.evaluation import fleet as fleet_module
from vericache_sglang.evaluation.altered import ENV
from vericache_sglang.evaluation.command import ended_in_order
from vericache_sglang.evaluation.fleet import Fleet, served
from vericache_sglang.evaluation.server import OwnServer, ServerError, free_port, spawn
from vericache_sglang.evaluation.systems import BUILT_IN

STAND_IN = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
port, altered, child = sys.argv[1:]
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(child, "w").write(str(worker.pid))
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        counters = {"altered": os.environ.get(altered, "")}
        state = {"internal_states": [{"vericache": counters}]}
        state["load_format"] = os.environ.get("STAND_IN_FORMAT", "auto")
        self.wfile.write(json.dumps(state).encode())
    def log_message(self, *args):
        pass
HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def stand_in(port, child, altered=ENV):
    return [sys.executable, "-c", STAND_IN, str(port), altered, str(child)]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_is_stopped_with_all_it_started(tmp_path):
    port = free_port()
    server = OwnServer(
        stand_in(port, tmp_path / "child"), port, {ENV: "x"}, tmp_path / "log"
    )
    try:
        server.wait(120)
        assert server.counters() == {"altered": "x"}
        child = int((tmp_path / "child").read_text())
        assert is_running(child)
        server.require("x")
        with pytest.raises(ServerError, match="is x, wanted not altered"):
            server.require("")
    finally:
        server.close()
    deadline = time.monotonic() + 120
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not server.is_healthy()


def test_who_has_the_process_id_of_an_ended_server_is_left_alone(tmp_path):
    server = OwnServer([sys.executable, "-c", ""], 1, {}, tmp_path / "log")
    server.process.wait(60)
    stranger = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    try:
        server.process.pid = stranger.pid
        server.close()
        assert stranger.poll() is None
        assert is_running(stranger.pid)
    finally:
        stranger.kill()
        stranger.wait(60)


def test_why_it_did_not_start_is_told(tmp_path):
    code = "print('loading'); print('ModuleNotFoundError: no kernel'); print('bye')"
    server = OwnServer([sys.executable, "-c", code], 1, {}, tmp_path / "log")
    with pytest.raises(ServerError, match=r"did not start: ModuleNotFoundError: no"):
        server.wait(120)
    server.close()
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    server = OwnServer(slow, 1, {}, tmp_path / "log")
    with pytest.raises(ServerError, match=r"not up after 0\.3 s: it printed nothing"):
        server.wait(0.3)
    server.close()


@pytest.fixture
def options(tmp_path):
    return argparse.Namespace(
        out=tmp_path,
        model="m",
        engine="--page-size 4",
        vericache="",
        one_at_a_time=False,
        simulated_acceptance=None,
        boot_seconds=120.0,
    )


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Have the fleet start stand-ins; return the arguments it was asked for."""
    asked = []

    def command(system, model, port, shared, ours):
        asked.append((system.name, model, shared, ours))
        return stand_in(port, tmp_path / f"child-{system.name}")

    monkeypatch.setattr(fleet_module, "command", command)
    return asked


def test_servers_stay_up_unless_one_at_a_time_is_asked(options, started):
    plain, ours = BUILT_IN["plain"], BUILT_IN["vericache"]
    fleet = Fleet(options)
    try:
        first, fresh = fleet.ready(plain)
        assert fresh
        assert fleet.ready(ours)[1]
        assert fleet.ready(plain) == (first, False)
        options.one_at_a_time = True
        options.simulated_acceptance = 0.5
        fleet.close()
        fleet = Fleet(options)
        first, _ = fleet.ready(plain)
        assert first.counters() == {"altered": ""}
        second, _ = fleet.ready(ours)
        assert second.counters() == {"altered": "accept=0.5"}
        assert not first.is_healthy()
        assert fleet.ready(plain)[1]
        assert fleet.ready(BUILT_IN["lossy"])[0].counters() == {"altered": "lossy"}
    finally:
        fleet.close()
    assert started[0] == ("plain", "m", ("--page-size", "4"), ())
    assert [name for name, *_ in started] == [
        *("plain", "vericache", "plain", "vericache", "plain", "lossy"),
    ]


def test_a_server_that_is_not_altered_as_asked_is_stopped(options, monkeypatch):
    """A plugin that SGLang failed to load leaves a server honest; it only logs that."""
    child = options.out / "child"

    def command(system, model, port, shared, ours):
        return stand_in(port, child, "NOT_READ_BY_THIS_ONE")

    monkeypatch.setattr(fleet_module, "command", command)
    fleet = Fleet(options)
    try:
        with pytest.raises(ServerError, match="not altered, wanted lossy"):
            fleet.ready(BUILT_IN["lossy"])
        deadline = time.monotonic() + 120
        while is_running(int(child.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        fleet.close()


def test_dummy_weights_are_refused_without_the_label(options, started, monkeypatch):
    monkeypatch.setenv("STAND_IN_FORMAT", "dummy")
    fleet = Fleet(options)
    try:
        with pytest.raises(ServerError, match="dummy weights: give --simulated-acc"):
            fleet.ready(BUILT_IN["plain"])
        options.simulated_acceptance = 0.5
        assert fleet.ready(BUILT_IN["plain"])[0].is_healthy()
    finally:
        fleet.close()


def test_a_terminated_benchmark_still_stops_its_servers():
    before = signal.getsignal(signal.SIGTERM)
    closed = []

    def run():
        with ended_in_order():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            finally:
                closed.append(True)

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 128 + signal.SIGTERM
    assert closed
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_server_that_ends_while_it_is_asked_is_told_with_its_log(monkeypatch):
    code = "print('scheduler: held by dead requests', flush=True); 1 / 0"

    def command(system, model, port, shared, ours):
        assert model == "m"
        return [sys.executable, "-c", code]

    monkeypatch.setattr(fleet_module, "command", command)
    plain = BUILT_IN["plain"]
    with pytest.raises(ServerError) as caught, served(plain, "m", start=spawn):
        pass
    assert str(caught.value).startswith("plain: did not start: ZeroDivisionError")
    assert "held by dead requests" in str(caught.value)


def test_a_port_is_given_once_on_a_machine():
    draw = """
from vericache_sglang.evaluation import server
server.PORTS = range(11000, 11060)
found = [server.free_port() for _ in range(20)]
print(*found, flush=True)
input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    drawing = [subprocess.Popen([sys.executable, "-c", draw], **pipes) for _ in "ab"]
    found = [each.stdout.readline().split() for each in drawing]
    for each in drawing:
        each.communicate("\n", timeout=60)
    assert len({port for each in found for port in each}) == 40
