"""Times prefills and every part of compressing inside a scheduler, call by call.

Works in plain SGLang too, where only prefills are found. A call that runs inside
another one is in both: ``observe`` is part of ``probe``, ``watch`` of ``prefill``.
"""

from __future__ import annotations

import json
import os
import time
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.tp_worker import TpModelWorker

from vericache_sglang.compression import catalog
from vericache_sglang.engine.codes import Codes
from vericache_sglang.engine.probing import Probing
from vericache_sglang.engine.prompt_watch import PromptWatch
from vericache_sglang.engine.splitter import Splitter

if TYPE_CHECKING:
    from collections.abc import Callable

    Told = Callable[..., dict[str, Any] | None]
    """What to write about a call, from its arguments; None passes it over."""

EVENTS = "VERICACHE_COST_EVENTS"
"""Environment variable: file that gets one JSON object a line."""

OUTER = ("prefill", "probes", "probe", "split")
"""What is timed by itself; the rest counts inside one of these, so not in decoding."""

RUNNING: list[str] = []
"""What is being timed now, the outer one first."""

WAITING: list[dict[str, Any]] = []
"""Events that are not written yet: the file is not written while something is timed."""


def install() -> None:
    """Hook what is measured; SGLang's plugin loader calls this in every process."""
    _time(TpModelWorker, "forward_batch_generation", "prefill", _prefill)
    _time(PromptWatch, "observe", "watch", _watched)
    for selector in catalog.OURS:
        for method in ("update", "observe", "scores"):
            if method in vars(selector):
                _time(selector, method, method)
    _time(Probing, "done", "probes")
    _time(Probing, "step", "probe")
    _time(Codes, "encode", "encode")
    _time(Codes, "put", "put")
    for method in ("to_host", "on_device"):
        _time(Splitter, method, "split")


def _prefill(_: Any, batch: Any, *more: Any, **named: Any) -> dict[str, Any] | None:
    """Pass over decoding, and over mixed forwards, which come without a batch."""
    if batch is None or not batch.forward_mode.is_extend():
        return None
    return {"start": int(batch.prefix_lens[0]), "tokens": sum(batch.extend_lens)}


def _watched(watch: Any, layer: int, *more: Any) -> dict[str, Any] | None:
    """Pass over probes, whose observing is timed itself."""
    return {"layer": layer} if watch.probe is None else None


def _always(*args: Any, **named: Any) -> dict[str, Any]:
    return {}


def _time(owner: type, name: str, what: str, told: Told = _always) -> None:
    measured: Callable[..., Any] = getattr(owner, name)

    @wraps(measured)
    def timed(*args: Any, **named: Any) -> Any:
        about = told(*args, **named) if what in OUTER or RUNNING else None
        if about is None:
            return measured(*args, **named)
        RUNNING.append(what)
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return measured(*args, **named)
        finally:
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            RUNNING.pop()
            WAITING.append({"what": what, "cpu": cpu, "wall": wall, **about})
            if not RUNNING:
                _write()

    setattr(owner, name, timed)


def _write() -> None:
    with Path(os.environ[EVENTS]).open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(event) + "\n" for event in WAITING)
    WAITING.clear()
