"""Reads torch's trace of a server: iterations, gaps between kernels, waits of the host.

An iteration is what the scheduler's thread does from one mark to the next. A kernel is
of the iteration in which it was launched, which is not always the one it runs in.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

MARK = re.compile(r"vericache\[(.*)\]$")
"""Of an iteration of VeriCache; see ``scripts/gpu/marks``."""

PLAIN_MARK = re.compile(r"step\[DECODE ")
"""Of an iteration of plain SGLang: its own range of a forward."""

PREFILL = "step[EXTEND"

WAITS = frozenset(
    {
        *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"),
        *("cuStreamSynchronize", "cuCtxSynchronize", "cuMemcpyDtoH_v2"),
    }
)
"""Calls in which the host waits for everything a stream was given."""

EVENT_WAITS = frozenset({"cudaEventSynchronize", "cuEventSynchronize"})
"""Calls in which it waits for one point of a stream."""

TO_PAGEABLE = "Device -> Pageable"
"""In the name of a copy that blocks the host, however it was asked for."""

BUSY = ("kernel", "gpu_memset")
INSIDE = "Memcpy DtoD"


@dataclass(frozen=True, slots=True)
class Iteration:
    """What an iteration was.

    Attributes:
        rows: How many rows did what: draft, verify, plain, wait.
        prefills: Whether a prompt was prefilled in it.
        kernels: Launched in it, those of graphs counted singly.
        window_us: From its first work on the device to the next iteration's first;
            0 where either has none.
        idle_us: Of that, in which no kernel ran; copies to and from the host do not
            count as work.
        waits: Calls in which the host waited for a stream.
        event_waits: Calls in which it waited for an event.
        blocking_copies: Copies to memory that is not pinned.
    """

    rows: Mapping[str, int]
    prefills: bool
    kernels: int
    window_us: float
    idle_us: float
    waits: int
    event_waits: int
    blocking_copies: int

    @property
    def only_drafts(self) -> bool:
        """Whether rows draft and none verifies: nothing is to be waited for."""
        return self.rows.get("draft", 0) > 0 and not self.rows.get("verify", 0)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the events of a trace.

    Raises:
        OSError: It cannot be read, or is still being written.
        ValueError: The same.
    """
    try:
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            found = json.load(stream)["traceEvents"]
    except EOFError as error:
        raise ValueError(f"{file} is not whole") from error
    return [event for event in found if event.get("ph") == "X"]


def iterations(events: Sequence[Mapping[str, Any]]) -> list[Iteration]:
    """Return the iterations of a trace, without the last one, which is cut off."""
    marks = _marks(events)
    if len(marks) < 2:
        return []
    starts = [mark["ts"] for mark in marks]
    thread = marks[0]["tid"]
    own = [e for e in events if e.get("tid") == thread and e.get("pid") == _pid(marks)]
    calls: list[Counter[str]] = [Counter() for _ in marks]
    at: dict[int, int] = {}
    prefills = set()
    for event in own:
        index = bisect_right(starts, event["ts"]) - 1
        if index < 0:
            continue
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[index][event["name"]] += 1
            at[event.get("args", {}).get("correlation", -1)] = index
        elif event["name"].startswith(PREFILL):
            prefills.add(index)
    work: list[list[Mapping[str, Any]]] = [[] for _ in marks]
    blocking: Counter[int] = Counter()
    for event in events:
        owner = at.get(event.get("args", {}).get("correlation", -2))
        if owner is None or not _on_device(event):
            continue
        if _is_work(event):
            work[owner].append(event)
        blocking[owner] += TO_PAGEABLE in event["name"]
    spans = _busy(event for event in events if _is_work(event))
    return [
        Iteration(
            _rows(marks[i]["name"]),
            i in prefills,
            len(work[i]),
            *_idle(work[i], work[i + 1], spans),
            sum(calls[i][name] for name in WAITS),
            sum(calls[i][name] for name in EVENT_WAITS),
            blocking[i],
        )
        for i in range(len(marks) - 1)
    ]


def _marks(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the marks in order of time: ours where there are any."""
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    for pattern in (MARK, PLAIN_MARK):
        found = [event for event in ranges if pattern.match(event["name"])]
        if found:
            return sorted(found, key=lambda event: event["ts"])
    return []


def _pid(marks: Sequence[Mapping[str, Any]]) -> Any:
    return marks[0].get("pid")


def _rows(name: str) -> dict[str, int]:
    match = MARK.match(name)
    if match is None:
        return {"plain": int((re.search(r"bs=(\d+)", name) or ["", "0"])[1])}
    pairs = (pair.split("=") for pair in match.group(1).split())
    return {phase: int(count) for phase, count in pairs}


def _on_device(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in (*BUSY, "gpu_memcpy")


def _is_work(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in BUSY or (
        event.get("cat") == "gpu_memcpy" and event["name"].startswith(INSIDE)
    )


def _busy(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the times in which work runs, as disjoint spans in order."""
    spans: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event["ts"]):
        begin, end = event["ts"], event["ts"] + event["dur"]
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    return spans


def _idle(
    work: Sequence[Mapping[str, Any]],
    following: Sequence[Mapping[str, Any]],
    spans: Sequence[tuple[float, float]],
) -> tuple[float, float]:
    """Return the length of an iteration's window, and what of it nothing ran in."""
    if not work or not following:
        return 0.0, 0.0
    begin = min(event["ts"] for event in work)
    end = min(event["ts"] for event in following)
    if end <= begin:
        return 0.0, 0.0
    first = max(0, bisect_right(spans, (begin, float("inf"))) - 1)
    busy = 0.0
    for low, high in spans[first:]:
        if low >= end:
            break
        busy += max(0.0, min(high, end) - max(low, begin))
    return end - begin, end - begin - busy
