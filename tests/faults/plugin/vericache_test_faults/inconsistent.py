"""One of the engine's calls raises now and then, as if its accounting did not add up.

The file that ``VERICACHE_TEST_WHERE`` names says which, a row of ``WHERE``; it is read
at every call, so that one server sees them all. ``row@1`` raises on rank 1 only,
``anywhere`` in one of 300 calls of any row, on each rank at times of its own.
"""

import os
import random
from collections import Counter
from pathlib import Path

from torch import distributed

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.host_store import HostStore
from vericache_sglang.kv.ledger import Ledger
from vericache_sglang.kv.moves import KVMoves
from vericache_sglang.kv.prefetch import StagingPrefetcher
from vericache_sglang.prefix_cache.cached_segments import CachedSegments
from vericache_sglang.prefix_cache.compress import PromptCompressor
from vericache_sglang.prefix_cache.index import SegmentIndex
from vericache_sglang.runtime.arrival import RequestStateFactory
from vericache_sglang.runtime.forward.rows import MixedRows
from vericache_sglang.runtime.in_flight import InFlightQueue
from vericache_sglang.runtime.tp_host import TensorParallelHost
from vericache_sglang.sampling.sampler import RowSampler
from vericache_sglang.scheduling.runtime import Runtime

ENV = "VERICACHE_TEST_WHERE"

WHERE = {
    # What is cached, and the books of it.
    "look-up": (CachedSegments, "reach", 2, 2),
    "ledger": (Ledger, "check", 3, 2),
    # What concerns one request.
    "prefetch": (StagingPrefetcher, "start", 5, 2),
    "arrival": (RequestStateFactory, "state_of", 3, 1),
    # What concerns all: rows that are half made; before a forward, in it, after it.
    "index": (SegmentIndex, "get", 20, 3),
    "compress": (PromptCompressor, "to_host", 3, 2),
    "move": (TensorParallelHost, "settles", 4, 2),
    "plan": (Runtime, "plan", 25, 2),
    "rows": (MixedRows, "add", 30, 2),
    "sampling": (RowSampler, "targets", 15, 2),
    "outcome": (InFlightQueue, "record_reported", 20, 1),
    "end": (KVMoves, "restore", 1, 1),
    "release": (HostStore, "drop", 2, 2),
    # Again and again: the second time a request is aborted.
    "always": (Runtime, "plan", 1, 10**9),
}
"""Name: class, call, every how many calls, how often in all."""


def injected(text, row):
    """Return whether the file's text names this row and this process's rank."""
    named, _, rank = text.partition("@")
    return named == row and (not rank or distributed.get_rank() == int(rank))


def install():
    """Have the calls raise, behind what they make where they make anything."""
    where, calls, failures = Path(os.environ[ENV]), Counter(), Counter()

    def guard(row):
        owner, name, every, times = WHERE[row]
        right = getattr(owner, name)

        def faulty(self, *given, **named):
            text = where.read_text()
            if text == "anywhere" and random.random() < 1 / 300:
                raise InvariantError(f"injected somewhere: {owner.__name__}.{name}")
            if not injected(text, row):
                return right(self, *given, **named)
            calls[text] += 1
            if calls[text] % every or failures[text] >= times:
                return right(self, *given, **named)
            failures[text] += 1
            if name in ("start", "to_host"):
                right(self, *given, **named)
            raise InvariantError(f"injected: {owner.__name__}.{name}")

        setattr(owner, name, faulty)

    for row in WHERE:
        guard(row)
