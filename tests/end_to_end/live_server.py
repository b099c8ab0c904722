"""A server of ours in a process of its own, on a free loopback port."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from lossless.runs import PATHS, STRICT
from lossless.warm import warm

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"


WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = itertools.cycle(range(12000 + 1000 * WORKER, 13000 + 1000 * WORKER))
"""Below what the kernel hands out by itself, and other ports in every test process."""


def free_port():
    """Return a port that no other server, and no other test process, will take."""
    while True:
        port = next(PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def start_fresh(command, environment, log):
    """Run ``python -m command`` in a process group of its own."""
    with log.open("w") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


class LiveServer:
    """``python -m vericache_sglang.launch_server`` with strict memory checks."""

    def __init__(self, folder, *flags, environment=None, fresh=False):
        """Start it: ``fresh`` as a user would, else forked off a warm process."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        command = ["vericache_sglang.launch_server"]
        command += ["--model-path", str(MODEL), "--port", str(self.port)]
        command += ["--nccl-port", str(free_port())]
        command += ["--max-running-requests", "16", "--log-level", "warning", *flags]
        more = {**STRICT, "PYTHONPATH": PATHS, **(environment or {})}
        self.process = (start_fresh if fresh else warm().start)(command, more, self.log)

    def wait(self, seconds=240):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.5)
            else:
                return self
        tail = self.log.read_text()[-4000:]
        raise AssertionError(f"not up after {seconds} s: {tail}")

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            body = reply.read()
        return json.loads(body) if body.startswith(b"{") else body

    def post(self, path, body):
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            text = reply.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else text

    def generate(self, texts, **params):
        """Answer ``texts`` at once, greedily unless ``params`` say otherwise."""
        sampling = {"temperature": 0.0, "max_new_tokens": 40, **params}
        more = sampling.pop("more", {})
        return self.post(
            "/generate", {"text": texts, "sampling_params": sampling, **more}
        )

    def counters(self):
        return self.get("/get_server_info")["internal_states"][0].get("vericache", {})

    def settle(self, seconds=30):
        """Wait until nothing runs; return the counters."""
        deadline = time.monotonic() + seconds
        while (counters := self.counters())["running"]:
            assert time.monotonic() < deadline, f"still running: {counters}"
            time.sleep(0.1)
        return counters

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
