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


class Servers:
    """Servers by name, and the model they serve."""

    def __init__(self, folder):
        self.model = widen(MODEL, folder / "model")
        flags = ("--model-path", str(self.model), *BOTH)
        self._started = {
            "kits": LiveServer(folder, *flags, *OURS),
            "plain": LiveServer(folder, *flags, "--disable-vericache"),
        }

    def __getitem__(self, name):
        return self._started[name].wait()

    def close(self):
        for server in self._started.values():
            server.close()


@pytest.fixture(scope="module")
def kit_servers(tmp_path_factory):
    """Return the servers of the kits: "kits" is ours, and "plain"."""
    servers = Servers(tmp_path_factory.mktemp("kits"))
    try:
        yield servers
    finally:
        servers.close()
