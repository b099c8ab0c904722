"""What the table of compressors needs inside a server process.

A server chooses draft lengths by what pays on its machine; here every round is as long
as its request allows, so that methods are compared at equal lengths. A request with
``custom_params`` {"table": {...}} is noted down when it ends: what it asked, its sizes,
its rounds and the seconds its prompt took to compress. One that asks for
{"alone": true} gets its drafts unverified: the compressed KV served alone.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from vericache_sglang.compression import catalog
from vericache_sglang.engine.arrival import Arrivals
from vericache_sglang.engine.probing import Probing
from vericache_sglang.engine.sampling import sampler
from vericache_sglang.engine.splitter import Splitter
from vericache_sglang.engine.worker import VeriCacheWorker
from vericache_sglang.scheduling.throughput import Throughput

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "table"
"""Name in ``custom_params`` of what is noted with a request, and in the server's
counters of the notes."""

NOTES: list[dict[str, Any]] = []
"""One for every request that has ended."""

SECONDS: Counter[str] = Counter()
"""Compressing, by request; of the scheduler's thread, so that others on the machine do
not count."""

PARTS: dict[str, dict[str, int]] = {}
"""``Budget`` of every prompt that was split, by request."""


def install() -> None:
    """Hook what is measured; SGLang's plugin loader calls this in every process."""
    _hold_draft_length()
    _serve_alone()
    for selector in catalog.OURS:
        _time(selector, "update", lambda self, step: step.rid)
    _time(Probing, "step", lambda self, state, *_: state.rid)
    _time(Splitter, "to_host", lambda self, state, *_: state.rid)
    _note_parts()
    _note_ends()


def _hold_draft_length() -> None:
    best = Throughput.best

    @wraps(best)
    def longest(self: Any, track: Any, *args: Any, **named: Any) -> Any:
        most = min(self._settings.draft_length, track.shape.longest)
        return replace(best(self, track, *args, **named), length=most)

    Throughput.best = longest


def _serve_alone() -> None:
    choose, state_of = sampler._run, Arrivals.state_of

    @wraps(state_of)
    def heard_at_once(self: Any, req: Any, *given: Any) -> Any:
        state = state_of(self, req, *given)
        if _asked(req).get("alone"):  # its tokens are chosen here, on the host
            state.late = False
        return state

    def chosen(row: Any, tokens: list[int]) -> list[int]:
        if row.verifies and _asked(row.state.req).get("alone"):
            # As the fault draft_part_alone of the tests, for this request only.
            return list(row.state.drafts) or tokens[:1]
        return choose(row, tokens)

    sampler._run, Arrivals.state_of = chosen, heard_at_once


def _time(owner: type, name: str, rid: Callable[..., str]) -> None:
    measured: Callable[..., Any] = getattr(owner, name)

    @wraps(measured)
    def timed(*args: Any) -> Any:
        began = time.thread_time()
        try:
            return measured(*args)
        finally:
            SECONDS[rid(*args)] += time.thread_time() - began

    setattr(owner, name, timed)


def _note_parts() -> None:
    to_host = Splitter.to_host

    @wraps(to_host)
    def noted(self: Any, state: Any, tree: Any, budget: Any, look: Any) -> Any:
        transfer = to_host(self, state, tree, budget, look)
        if transfer is not None:
            PARTS[state.rid] = {**asdict(budget), "slots": budget.slots}
        return transfer

    Splitter.to_host = noted


def _note_ends() -> None:
    release, report = VeriCacheWorker.release, VeriCacheWorker.report

    @wraps(release)
    def noted(self: Any, req: Any) -> None:
        state = self._states.get(req.rid)
        if state is not None and _asked(req):
            figures = state.figures
            NOTES.append(
                {
                    **_asked(req),
                    "prompt": state.prompt,
                    "kv_bytes": state.prompt * self.residence.geometry.token_bytes,
                    "rounds": figures.rounds,
                    "drafted": figures.drafted,
                    "accepted": figures.accepted,
                    "staged_bytes": figures.staged_bytes,
                    "compress_seconds": SECONDS.pop(req.rid, 0.0),
                    "parts": PARTS.pop(req.rid, None),
                }
            )
        release(self, req)

    VeriCacheWorker.release = noted
    VeriCacheWorker.report = lambda self: {**report(self), KEY: list(NOTES)}


def _asked(req: Any) -> dict[str, Any]:
    """Return what a request asks of the table; empty where it asks nothing."""
    return (req.sampling_params.custom_params or {}).get(KEY, {})
