"""Times prefills and every step of compressing a prompt inside a server, per call.

In plain SGLang only prefills are timed. Nested calls count in both: ``observe`` is part
of ``probe``, ``observer`` of ``prefill``.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    About = Callable[..., dict[str, Any] | None]
    """What to write of a call, from its arguments; None passes it over."""

CLOCKS = ("cpu", "wall")
"""CPU time of the scheduler's thread, and wall time, in seconds."""

OUTER = ("prefill", "probes", "probe", "split")
"""Top-level events; all others are nested in one of these, so not in decoding."""


@dataclass(slots=True)
class Sums:
    """Seconds of one request.

    Attributes:
        prompt: Tokens its prefill ran.
        seconds: Clock -> what was timed -> seconds, all layers and calls together.
        calls: What was timed -> how often it was called.
        split: Counts of the compressed prompt: tokens offered, kept and coded, slots.
    """

    prompt: int = 0
    seconds: dict[str, dict[str, float]] = field(
        default_factory=lambda: {clock: defaultdict(float) for clock in CLOCKS}
    )
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    split: dict[str, int] = field(default_factory=dict)

    def prefill(self, clock: str) -> float:
        """Return the seconds of its prefill without its observer."""
        seconds = self.seconds[clock]
        return seconds["prefill"] - seconds["observer"]

    def outside(self, clock: str) -> float:
        """Return the seconds compressing took once its prefill was done."""
        seconds = self.seconds[clock]
        return seconds["probes"] + seconds["probe"] + seconds["split"]

    def compressing(self, clock: str) -> float:
        """Return all seconds compressing took."""
        return self.seconds[clock]["observer"] + self.outside(clock)


def read_sums(file: Path) -> list[Sums]:
    """Sum the events of requests that were served one after the other.

    Raises:
        ValueError: Something was timed before any prefill began.
    """
    requests: list[Sums] = []
    waiting: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        waiting.append(event)
        if event["what"] == "prefill":
            # What ran inside it stands before it, because it ended before it.
            if event["start"] == 0:
                requests.append(Sums())
            requests[-1].prompt += event["tokens"]
        elif event["what"] not in OUTER:
            continue
        if not requests:
            raise ValueError(f"{file}: {event['what']} before a prefill")
        _add(requests[-1], waiting)
        waiting = []
    return requests


def _add(request: Sums, events: Iterable[dict[str, Any]]) -> None:
    for event in events:
        what = event["what"]
        request.calls[what] += 1
        for clock in CLOCKS:
            request.seconds[clock][what] += event[clock]
        if what == "split":
            request.split = {key: event[key] for key in ("offered", "kept", "coded")}
            request.split["slots"] = event["slots"]


def medians(runs: Iterable[Sums]) -> dict[str, float]:
    """Return the median over runs of every figure of one prompt.

    ``prefill_{clock}``: seconds; ``{what}_{clock}``: seconds; ``{what}_share``,
    ``outside_ratio`` and ``compress_ratio``: over the same request's prefill, by the
    thread's clock, of a part, of all that is done after the prefill, and of all. The
    last one's least and most over the runs say how noisy the machine was.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        prefill = run.prefill("cpu")
        for clock in CLOCKS:
            found[f"prefill_{clock}"].append(run.prefill(clock))
            for what, seconds in run.seconds[clock].items():
                if what != "prefill":
                    found[f"{what}_{clock}"].append(seconds)
        for what, seconds in run.seconds["cpu"].items():
            if what != "prefill":
                found[f"{what}_share"].append(seconds / prefill)
        found["outside_ratio"].append(run.outside("cpu") / prefill)
        found["outside_ratio_wall"].append(run.outside("wall") / run.prefill("wall"))
        found["compress_ratio"].append(run.compressing("cpu") / prefill)
    ratios = found["compress_ratio"]
    return {
        **{name: float(np.median(values)) for name, values in sorted(found.items())},
        "compress_ratio_least": min(ratios),
        "compress_ratio_most": max(ratios),
    }


def install(events: Path) -> None:
    """Time what is measured in this process.

    Args:
        events: File that gets one JSON object a line.
    """
    from sglang.srt.managers.tp_worker import TpModelWorker

    from vericache_sglang.compression import catalog
    from vericache_sglang.kv.packed_drafts import Codes
    from vericache_sglang.kv.prefill_observer import PrefillObserver
    from vericache_sglang.prefix_cache.compress import PromptCompressor
    from vericache_sglang.runtime.probing import Probing

    timer = _Timer(events)
    timer.time(TpModelWorker, "forward_batch_generation", "prefill", _prefill)
    timer.time(PrefillObserver, "observe", "observer", _observed)
    for selector in catalog.OURS:
        for method in ("update", "observe", "scores"):
            if method in vars(selector):
                timer.time(selector, method, method)
    timer.time(Probing, "done", "probes")
    timer.time(Probing, "step", "probe")
    timer.time(Codes, "encode", "encode")
    timer.time(Codes, "put", "put")
    for method in ("to_host", "on_device"):
        timer.time(PromptCompressor, method, "split", _split)


def _prefill(_: Any, batch: Any, *more: Any, **named: Any) -> dict[str, Any] | None:
    """Skip decoding, and mixed forwards, which come without a batch."""
    if batch is None or not batch.forward_mode.is_extend():
        return None
    return {"start": int(batch.prefix_lens[0]), "tokens": sum(batch.extend_lens)}


def _observed(observer: Any, layer: int, *more: Any) -> dict[str, Any] | None:
    """Skip probes: their ``observe`` calls are timed separately."""
    return {"layer": layer} if observer.probe is None else None


def _split(_: Any, state: Any, tree: Any, budget: Any, *more: Any) -> dict[str, Any]:
    counts = {key: getattr(budget, key) for key in ("offered", "kept", "coded")}
    return {**counts, "slots": budget.slots}


def _always(*args: Any, **named: Any) -> dict[str, Any]:
    return {}


class _Timer:
    """Wraps functions; nothing is written while something is timed."""

    def __init__(self, events: Path) -> None:
        self._file = events
        self._running: list[str] = []
        self._waiting: list[dict[str, Any]] = []

    def time(self, owner: type, name: str, what: str, about: About = _always) -> None:
        """Have calls of ``owner.name`` timed as ``what``."""
        measured: Callable[..., Any] = getattr(owner, name)

        @wraps(measured)
        def timed(*args: Any, **named: Any) -> Any:
            counts = what in OUTER or self._running
            found = about(*args, **named) if counts else None
            if found is None:
                return measured(*args, **named)
            self._running.append(what)
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return measured(*args, **named)
            finally:
                cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
                self._running.pop()
                event = {"what": what, "cpu": cpu, "wall": wall, **found}
                self._waiting.append(event)
                if not self._running:
                    self._write()

        setattr(owner, name, timed)

    def _write(self) -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(event) + "\n" for event in self._waiting)
        self._waiting.clear()
