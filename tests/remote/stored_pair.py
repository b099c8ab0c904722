"""A drafter and a verifier that share a store, which has the KV of documents.

The drafter's link to the store is EMULATED: reads from a folder are delayed.
"""

import json
from contextlib import contextmanager

from live_pair import Pair

FLAGS = (
    *("--vericache-compressor", "keynorm", "--hicache-storage-backend", "file"),
    "--hicache-storage-backend-extra-config",
)
HELD = ("kept_slots", "staging_slots", "running", "cache_draft_slots_used")
TOKENS = 240
SEEDED = {"temperature": 0.8, "sampling_seed": 7, "ignore_eos": True}
# Without the filter SGLang draws other noise for a seed beside greedy requests.
FILTERED = {**SEEDED, "top_p": 0.95}
RETRACTED = {
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "30",
    # Answers that are not streamed are sent in parts all the same, seldom by default.
    "SGLANG_FORCE_STREAM_INTERVAL": "1",
}


def store(folder, **link):
    return json.dumps({"directory": str(folder / "store"), **link})


@contextmanager
def servers(folder, plain, documents, *flags, path="p1", of_drafter=(), **others):
    """Start servers whose store has the KV of the documents."""
    # On P2 three times as much, the residual KV, has to come within an answer too.
    rate = 80 if path == "p2" else 40
    slow = (FLAGS[-1], store(folder, read_mb_per_s=rate, latency_ms=1))
    own = ("--vericache-remote-path", path, *slow, *of_drafter)
    found = Pair(folder, plain, (*FLAGS, store(folder), *flags), own, **others)
    with found.started():
        found.keep(documents)
        yield found


def settled(server):
    counters = server.settle()
    assert {name: counters[name] for name in HELD} == dict.fromkeys(HELD, 0)
    return counters
