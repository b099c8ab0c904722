"""What the fork server starts: output, exit status, process group, end."""

import subprocess
import sys
import time

import pytest

from vericache_sglang.errors import InvariantError
from vericache_sglang.evaluation.fleet import ONE_THREAD
from vericache_sglang.evaluation.fork_server import (
    SCHEDULER,
    ForkedProcess,
    ForkServer,
    forks_with,
)
from vericache_sglang.evaluation.server import OwnServer, ServerError, free_port

ECHO = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen(["sleep", "300"])
print(os.environ["VERICACHE_GREETING"], "wave" in sys.modules, child.pid, flush=True)
class Echo(http.server.BaseHTTPRequestHandler):
    def answer(self, found):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(found)
    def do_GET(self):
        self.answer(b"{}")
    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["Content-Length"])))
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Echo).serve_forever()
"""


@pytest.fixture
def forks(tmp_path):
    """Yield a fork server that has imported next to nothing."""
    server = ForkServer(
        tmp_path / "forks.log", {"VERICACHE_GREETING": "wrong"}, ["wave"]
    )
    yield server
    server.close()


@pytest.fixture
def forked(forks, tmp_path):
    """Fork programs in a server's place; they are stopped."""
    started = []

    def start(program, **more):
        (tmp_path / "forked_program.py").write_text(program)
        port = free_port()
        command = [sys.executable, "-m", "forked_program", "--port", str(port)]
        more |= {"PYTHONPATH": str(tmp_path), "VERICACHE_GREETING": "hello"}
        log = tmp_path / "log"
        started.append(OwnServer(command, port, more, log, forks.start))
        return started[-1]

    yield start
    for server in started:
        server.close(at_once=True)


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_ended(pid):
    deadline = time.monotonic() + 30
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)


def test_a_forked_server_answers_and_leaves_no_process(forked):
    server = forked(ECHO)
    server.wait(60)
    assert server.generate({"text": "one"}) == {"text": "one"}
    greeting, imported, child = server.output().split()[:3]
    assert (greeting, imported) == ("hello", "True")
    assert runs(child)
    server.close(at_once=True)
    assert server.process.poll() == -9
    wait_until_ended(child)


@pytest.mark.extended
def test_a_variable_that_imports_read_starts_a_fresh_process(forked):
    server = forked("import sys; print('wave' in sys.modules)", SGLANG_READ_EARLY="1")
    assert server.process.wait(60) == 0
    assert server.output() == "False\n"


@pytest.mark.extended
@pytest.mark.sglang
def test_what_sglangs_scheduler_reads_while_imported_is_set_in_a_fork(tmp_path):
    names = "TEST_RETRACT, TEST_RETRACT_INTERVAL, TEST_RETRACT_NO_PREFILL_BS"
    program = f"from {SCHEDULER} import *; print({names})"
    (tmp_path / "forked_program.py").write_text(program)
    given = {"PYTHONPATH": str(tmp_path)}
    wanted = {
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "7",
        "SGLANG_TEST_RETRACT_NO_PREFILL_BS": "5",
    }
    for more, printed in ((wanted, "True 7 5\n"), ({}, f"False 3 {2**31}\n")):
        log = tmp_path / "log"
        command = [sys.executable, "-m", "forked_program"]
        ended = forks_with(**ONE_THREAD).start(command, given | more, log)
        assert isinstance(ended, ForkedProcess)
        assert ended.wait(60) == 0
        assert log.read_text() == printed


@pytest.mark.extended
def test_a_server_that_ends_tells_how_its_log_ends(forked):
    server = forked("raise SystemExit(print('Error: no such model') or 3)")
    with pytest.raises(ServerError, match="no such model"):
        server.wait(60)
    assert server.process.poll() == 3


def test_a_process_that_ended_before_it_was_looked_at_has_its_status(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    status = tmp_path / "status"
    status.write_text("3")
    process = ForkedProcess(ended.pid, status)
    assert (process.poll(), process.wait(1)) == (3, 3)


@pytest.mark.extended
def test_what_is_forked_ends_with_the_fork_server(tmp_path):
    forks = ForkServer(tmp_path / "forks.log", {}, ["wave"])
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
    process = forks.start([*command, str(free_port())], {}, tmp_path / "log")
    assert runs(process.pid)
    forks.close()
    wait_until_ended(process.pid)


@pytest.mark.extended
def test_what_cannot_be_forked_is_an_error(tmp_path, forks):
    with pytest.raises(InvariantError, match="only python -m"):
        forks.start(["sleep", "1"], {}, tmp_path / "log")
    broken = ForkServer(tmp_path / "broken.log", {}, ["no_such_module"])
    with pytest.raises(ServerError, match="no_such_module"):
        broken.start([sys.executable, "-m", "wave"], {}, tmp_path / "log")
