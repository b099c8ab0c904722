"""The servers of the kits: ours drafts every prompt it can, plain SGLang for doubt."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from live_server import MODEL, LiveServer
from wide_model import widen

BOTH = (
    *("--max-total-tokens", "30000"),
    *("--enable-deterministic-inference", "--constrained-json-disable-any-whitespace"),
)
"""Without that last flag a grammar lets the demo model write blanks for ever."""

OURS = (
    *("--vericache-min-prompt", "1", "--vericache-draft-length", "8"),
    *("--vericache-sink-tokens", "1", "--vericache-recent-tokens", "2"),
    *("--vericache-residency", "host"),
)
"""The kits' prompts have 20 to 500 tokens here: drop most of each, draft always."""

TIMEOUTS = {"SGLANG_REQ_WAITING_TIMEOUT": "0.5", "SGLANG_REQ_RUNNING_TIMEOUT": "12"}


class Servers:
    """Servers by name; "timeouts" starts when it is first asked for."""

    def __init__(self, folder):
        self.model = widen(MODEL, folder / "model")
        self._folder = folder
        self._started = {name: self._start(name) for name in ("kits", "plain")}

    def __getitem__(self, name):
        if name not in self._started:
            self._started[name] = self._start(name)
        return self._started[name].wait()

    def _start(self, name):
        flags = ("--model-path", str(self.model), *BOTH)
        if name == "plain":
            return LiveServer(self._folder, *flags, "--disable-vericache")
        if name == "kits":
            return LiveServer(self._folder, *flags, *OURS)
        few = ("--max-running-requests", "8")
        return LiveServer(self._folder, *flags, *OURS, *few, environment=TIMEOUTS)

    def close(self):
        for server in self._started.values():
            server.close()


@pytest.fixture(scope="module")
def kit_servers(tmp_path_factory):
    """Return the servers of the kits: "kits" and "timeouts" are ours, and "plain"."""
    servers = Servers(tmp_path_factory.mktemp("kits"))
    try:
        yield servers
    finally:
        servers.close()
