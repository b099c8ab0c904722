"""What the table of compressors needs inside a server process.

A server chooses draft lengths by what pays on its machine; here every round is as long
as its request allows, so that methods are compared at equal lengths. Compressing is
timed and sizes are counted, both reported with the server's counters. And while a file
exists, drafts are emitted unverified: the compressed KV served alone.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_test_faults import draft_part_alone

from vericache_sglang.compression import catalog
from vericache_sglang.engine.probing import Probing
from vericache_sglang.engine.residence import Residence
from vericache_sglang.engine.sampling import sampler
from vericache_sglang.engine.splitter import Splitter
from vericache_sglang.engine.worker import VeriCacheWorker
from vericache_sglang.scheduling.throughput import Throughput

if TYPE_CHECKING:
    from collections.abc import Callable

SWITCH = "VERICACHE_TABLE_ALONE"
"""Environment variable: path of the file whose existence serves drafts unverified."""

KEY = "table"
"""Where in the server's counters ours are."""

COUNTED: Counter[str] = Counter()
"""Seconds are of the scheduler's thread: others on the machine do not count."""


def install() -> None:
    """Hook what is measured; SGLang's plugin loader calls this in every process."""
    _hold_draft_length()
    _add_switch(Path(os.environ[SWITCH]))
    for selector in catalog.OURS:
        _time(selector, "update", "update_seconds")
    _time(Probing, "step", "probe_seconds")
    _time(Splitter, "to_host", "split_seconds")
    _count_parts()
    _count_reloads()
    report = VeriCacheWorker.report
    VeriCacheWorker.report = lambda self: {**report(self), KEY: dict(COUNTED)}


def _hold_draft_length() -> None:
    best = Throughput.best

    @wraps(best)
    def longest(self: Any, track: Any, *args: Any, **named: Any) -> Any:
        most = min(self._settings.draft_length, track.shape.longest)
        return replace(best(self, track, *args, **named), length=most)

    Throughput.best = longest


def _add_switch(file: Path) -> None:
    verified = sampler.accepted_tokens
    draft_part_alone.install()
    alone = sampler.accepted_tokens

    def chosen(drafts: Any, target: Any) -> list[int]:
        return (alone if file.exists() else verified)(drafts, target)

    sampler.accepted_tokens = chosen


def _time(owner: type, name: str, counter: str) -> None:
    measured: Callable[..., Any] = getattr(owner, name)

    @wraps(measured)
    def timed(*args: Any, **named: Any) -> Any:
        began = time.thread_time()
        try:
            return measured(*args, **named)
        finally:
            COUNTED[counter] += time.thread_time() - began

    setattr(owner, name, timed)


def _count_parts() -> None:
    to_host = Splitter.to_host

    @wraps(to_host)
    def counted(self: Any, state: Any, tree: Any, budget: Any, look: Any) -> Any:
        transfer = to_host(self, state, tree, budget, look)
        if transfer is not None:
            for name in ("offered", "kept", "coded", "code_slots", "exact"):
                COUNTED[name] += getattr(budget, name)
            COUNTED["prompt_tokens"] += state.prompt
        return transfer

    Splitter.to_host = counted


def _count_reloads() -> None:
    start = Residence.start_reload

    @wraps(start)
    def counted(self: Any, state: Any) -> int:
        nbytes = start(self, state)
        COUNTED["reloads"] += 1
        COUNTED["reload_bytes"] += nbytes
        COUNTED["reload_kv_bytes"] += state.prompt * self.geometry.token_bytes
        return nbytes

    Residence.start_reload = counted
