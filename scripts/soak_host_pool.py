"""The host arena for minutes: every byte is checked, and memory does not grow.

    python scripts/soak_host_pool.py --minutes 60 --out host_pool.json

Cached segments (whole KV, draft parts, complements, packed planes) are put, read and
dropped at random, the least recently used leave first; requests hold complements and
parked images in the same arena meanwhile. Contents come from a seed and are compared.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import Counter, OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent))

from lossless.provenance import provenance, publish
from vericache_sglang.compression.budget import Budget
from vericache_sglang.errors import TransferError
from vericache_sglang.memory.arena import Arena
from vericache_sglang.memory.geometry import KVGeometry
from vericache_sglang.memory.host_store import HostStore
from vericache_sglang.memory.segment_pool import SegmentPool
from vericache_sglang.memory.segments import SEGMENT

MIB = 1 << 20
DTYPE = torch.bfloat16
DEMO = KVGeometry(
    layers=4,
    kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    element_bytes=DTYPE.itemsize,
    page_size=1,
)
"""Shapes of configs/demo-model-long in bfloat16: 1 MiB a segment."""

HOT_SHARE, HOT_GETS = 0.1, 0.8
"""A tenth of the names has four fifths of the calls."""

MAX_PINNED = 3
MAX_REQUESTS = 4
CHECK_EVERY = 500
WARM_SHARE = 0.1
"""Share of the time after which the arena has been full, and RSS is compared."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--budget-mb", type=int, default=64)
    parser.add_argument("--working-set-mb", type=int, default=1024)
    parser.add_argument("--growth-mb", type=float, default=8.0, help="most RSS growth")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="also write the JSON to this file")
    return parser.parse_args()


def segment(number: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one name; equal for equal numbers."""
    rng = Random(number)
    noise = np.random.default_rng(number)

    def plane(size: int) -> torch.Tensor:
        return torch.from_numpy(noise.integers(0, 256, size, dtype=np.uint8))

    def entries(tokens: int) -> torch.Tensor:
        shape = (DEMO.layers, tokens, DEMO.kv_heads, DEMO.head_dim)
        return plane(math.prod(shape) * DTYPE.itemsize).view(DTYPE).view(shape)

    kind = rng.choice(("whole", "draft", "rest", "codes", "residual"))
    if kind == "whole":
        return {"keys": entries(SEGMENT), "values": entries(SEGMENT)}
    if kind in ("draft", "rest"):
        tokens = rng.randrange(32, SEGMENT - 32)
        kept = torch.arange(tokens, dtype=torch.int32).expand(4, 2, -1).contiguous()
        return {"keys": entries(tokens), "values": entries(tokens), "kept": kept}
    # Planes of 4 to 8 bits an element, and escapes that nobody knows beforehand.
    bits = rng.randrange(4, 9)
    size = SEGMENT * DEMO.token_bytes * bits // 16 + rng.randrange(20_000)
    return {"plane": plane(size), "scales": entries(SEGMENT // 64)}


class Soak:
    """One arena, its pool and its store, and what they should hold.

    Args:
        options: See ``arguments``.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.rng = Random(options.seed)
        self.arena = Arena(options.budget_mb * MIB, pinned=torch.cuda.is_available())
        self.pool = SegmentPool(self.arena)
        self.store = HostStore(DEMO, DTYPE, self.arena)
        self.store.evictor = self.evict
        self.counts: Counter[str] = Counter()
        self.put_s: list[float] = []
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._pinned: dict[int, dict[str, torch.Tensor]] = {}
        self._requests: dict[str, str] = {}
        mean = sum(SegmentPool.bytes_for(segment(n)) for n in range(200)) / 200
        self.names = int(options.working_set_mb * MIB / mean)
        # Measured from here on: the run's own list, not the arena's, would grow.
        self._most_timed = 10_000

    def step(self) -> None:
        """Do one random thing."""
        kind = self.rng.choices(("get", "drop", "pin", "request"), (90, 2, 4, 4))[0]
        if kind == "get":
            self.read(self._name())
        elif kind == "drop":
            self._drop(self._name())
        elif kind == "pin":
            self._turn_pin()
        else:
            self._turn_request()
        self.counts["steps"] += 1
        if self.counts["steps"] % CHECK_EVERY == 0:
            self.check()

    def read(self, number: int) -> None:
        """Compare what a name holds, or write it."""
        wanted = segment(number)
        found = self.pool.get(str(number))
        if found is not None:
            self.counts["hits"] += 1
            self.compare(number, found, wanted)
            self._recent.move_to_end(number)
            return
        self.counts["misses"] += 1
        self.evict(self.pool.shortfall(SegmentPool.bytes_for(wanted)))
        while not self._put(number, wanted):
            if not self._evict_one():
                self.counts["refused"] += 1
                return
        self._recent[number] = None

    def compare(
        self,
        number: int,
        found: dict[str, torch.Tensor],
        wanted: dict[str, torch.Tensor],
    ) -> None:
        """Count what differs; NaNs compare as the bits they are."""
        for field, tensor in wanted.items():
            other = found[field]
            kind = (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
            equal = kind and torch.equal(
                other.view(torch.uint8), tensor.view(torch.uint8)
            )
            self.counts["compared_bytes"] += tensor.nbytes
            if not equal:
                self.counts["different"] += 1
                print(f"segment {number}: {field} differs", file=sys.stderr)

    def evict(self, nbytes: int) -> None:
        """Free bytes for a request."""
        while nbytes > 0 and (freed := self._evict_one()):
            nbytes -= freed

    def check(self) -> None:
        """Recount everything, and look at what is pinned."""
        self.pool.check()
        self.store.check(self._requests, others=self.pool.used_bytes)
        for number, views in self._pinned.items():
            self.compare(number, views, segment(number))
        for rid, kind in self._requests.items():
            image = (
                self.store.parked(rid) if kind == "park" else self.store.complement(rid)
            )
            for layer in range(DEMO.layers):
                image.verify(layer)
            self.counts["verified_images"] += 1

    def _name(self) -> int:
        hot = int(self.names * HOT_SHARE)
        if self.rng.random() < HOT_GETS:
            return self.rng.randrange(hot)
        return self.rng.randrange(hot, self.names)

    def _put(self, number: int, tensors: dict[str, torch.Tensor]) -> bool:
        free, needed = self.arena.free_bytes, SegmentPool.bytes_for(tensors)
        began = time.thread_time()
        made = self.pool.put(str(number), tensors)
        seconds = time.thread_time() - began
        if made:
            self.counts["put_bytes"] += needed
            if len(self.put_s) < self._most_timed:
                self.put_s.append(seconds)
            else:
                self.put_s[self.rng.randrange(self._most_timed)] = seconds
        elif needed <= free:
            self.counts["puts_in_the_way_of_held_bytes"] += 1
        return made

    def _evict_one(self) -> int:
        """Drop the least recently used name that nobody pins; return its bytes."""
        for number in self._recent:
            if number not in self._pinned:
                del self._recent[number]
                self.counts["evictions"] += 1
                return self.pool.drop(str(number))
        return 0

    def _drop(self, number: int) -> None:
        if number in self._recent and number not in self._pinned:
            del self._recent[number]
            self.pool.drop(str(number))
            self.counts["drops"] += 1

    def _turn_pin(self) -> None:
        if len(self._pinned) >= MAX_PINNED or not self._recent:
            number = self.rng.choice(sorted(self._pinned))
            self.compare(number, self._pinned.pop(number), segment(number))
            self.pool.unpin(str(number))
            return
        number = self.rng.choice(list(self._recent))
        if number not in self._pinned:
            self.pool.pin(str(number))
            self._pinned[number] = self.pool.get(str(number)) or {}

    def _turn_request(self) -> None:
        if len(self._requests) >= MAX_REQUESTS:
            rid = self.rng.choice(sorted(self._requests))
            del self._requests[rid]
            self.store.drop(rid)
            return
        rid = f"request {self.counts['steps']}"
        slots = self.rng.randrange(128, 4096)
        kind = self.rng.choice(("open", "park"))
        try:
            if kind == "open":
                kept = self.rng.randrange(1, slots)
                image: Any = self.store.open(rid, Budget(slots, kept, 0, 0))
                image.kept.fill_(kept)
            else:
                image = self.store.park(rid, slots)
        except TransferError:
            self.counts["refused_requests"] += 1
            return
        value = self.counts["steps"] % 251
        for layer in range(DEMO.layers):
            for entries in (image.keys, image.values):
                entries[layer].view(torch.uint8).fill_(value)
            image.seal(layer)
        self._requests[rid] = kind
        self.counts["requests"] += 1
        self.counts["request_bytes"] += image.held_bytes


def rss_mib() -> float:
    """Return the memory of this process, in MiB."""
    return psutil.Process(os.getpid()).memory_info().rss / MIB


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Soak, and return the figures."""
    segment(0)  # what torch loads on first use is not the arena's
    rss = {"start": rss_mib()}
    soak = Soak(options)
    began = time.monotonic()
    seconds = options.minutes * 60
    while (elapsed := time.monotonic() - began) < seconds:
        soak.step()
        if "warm" not in rss and elapsed > WARM_SHARE * seconds:
            rss["warm"] = rss_mib()
    soak.check()
    rss["end"] = rss_mib()
    puts = sorted(soak.put_s)
    moved = soak.arena.moved_bytes
    return {
        "seconds": time.monotonic() - began,
        "names": soak.names,
        **dict(sorted(soak.counts.items())),
        "checksum_failures": soak.pool.checksum_failures,
        "arena_bytes": soak.arena.size,
        "used_bytes_at_end": soak.arena.used_bytes,
        "moved_bytes": moved,
        "moved_per_byte_written": moved
        / (soak.counts["put_bytes"] + soak.counts["request_bytes"]),
        "put_cpu_ms": {
            share: 1e3 * puts[int(float(share) * (len(puts) - 1))]
            for share in ("0.5", "0.99", "1.0")
        },
        "rss_mib": rss,
        "rss_growth_mib": rss["end"] - rss["warm"],
    }


def main() -> int:
    """Run and print; status 1 when a byte differs or memory grows."""
    options = arguments()
    figures = run(options)
    report = {**provenance(sys.argv[1:]), "options": vars(options), **figures}
    publish(report, options.out)
    bad = figures.get("different", 0) + figures["checksum_failures"]
    return 1 if bad or figures["rss_growth_mib"] > options.growth_mb else 0


if __name__ == "__main__":
    sys.exit(main())
