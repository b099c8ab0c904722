"""Timeouts of requests, and a server that is asked to stop while it drafts."""

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from live_server import LiveServer

pytestmark = [pytest.mark.server, pytest.mark.extended]

FLAGS = (
    *("--vericache-min-prompt", "64", "--vericache-draft-length", "8"),
    *("--vericache-residency", "host"),
    *("--max-total-tokens", "36000", "--max-running-requests", "3"),
)
LIMITS = {"SGLANG_REQ_WAITING_TIMEOUT": "10", "SGLANG_REQ_RUNNING_TIMEOUT": "24"}
"""Seconds a request may queue, and run."""

STOPPED = 0
"""Exit status of plain SGLang after SIGTERM."""

HELD = ("kept_slots", "staging_slots", "host_bytes", "running")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return a server of ours with time limits; the last test stops it."""
    live = LiveServer(tmp_path_factory.mktemp("drain"), *FLAGS, environment=LIMITS)
    try:
        yield live.wait()
    finally:
        live.close()


class Client(threading.Thread):
    """One streaming client; keeps what it was told."""

    def __init__(self, server, prompt, tokens):
        super().__init__(daemon=True)
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        self.body = {"text": prompt, "stream": True, "sampling_params": sampling}
        self.url = server.url + "/generate"
        self.begun = threading.Event()
        self.chunks, self.whole = [], False
        self.start()

    def run(self):
        request = urllib.request.Request(
            self.url,
            json.dumps(self.body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    self.chunks.append(json.loads(line[6:]))
                    self.begun.set()
                self.whole |= line.startswith(b"data: [DONE]")

    def result(self):
        self.join(120)
        return self.chunks[-1]


def test_requests_that_take_too_long_are_refused(server, prompts):
    """Three run into the limit while they draft, one while it queues."""
    running = [Client(server, prompt, 10000) for prompt in prompts[:3]]
    for client in running:
        assert client.begun.wait(60)
    queued = Client(server, prompts[3], 20)
    told = [queued.result(), *(client.result() for client in running)]
    for kind, chunk in zip(["waiting", *["running"] * 3], told, strict=True):
        error = chunk.get("error") or chunk["meta_info"]["finish_reason"]
        assert error["message"] == f"Request {kind} timeout reached."
    counters = server.settle()
    assert counters["cycles"] > 0
    assert {name: counters[name] for name in HELD} == dict.fromkeys(HELD, 0)


def shared_memory(processes):
    """Return the files under /dev/shm that the processes have mapped.

    SGLang leaves the one in which it counts its load, and clears it at a later start.
    """
    maps = {m.path for process in processes for m in process.memory_maps()}
    files = {Path(path) for path in maps if path.startswith("/dev/shm/")}
    return {file for file in files if not file.name.startswith("sglang_loads_")}


def test_a_stopped_server_ends_what_it_began(server, prompts):
    """Streams are completed, processes and shared memory are gone, as with SGLang."""
    family = [psutil.Process(server.process.pid)]
    family += family[0].children(recursive=True)
    clients = [Client(server, prompt, 200) for prompt in prompts[:3]]
    for client in clients:
        assert client.begun.wait(60)
    assert server.counters()["running"] > 0
    files = shared_memory(family)
    os.kill(server.process.pid, signal.SIGTERM)
    for client in clients:
        last = client.result()
        assert client.whole
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 200}
    assert server.process.wait(60) == STOPPED
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert [file for file in files if file.exists()] == []
    assert "Traceback" not in server.log.read_text()
