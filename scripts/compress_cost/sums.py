"""Sums of what a server's timers wrote, request by request, and their medians."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CLOCKS = ("cpu", "wall")
"""Seconds of the scheduler's thread alone, and seconds that passed."""

OUTER = ("prefill", "probes", "probe", "split")
"""Events that others stand inside; what they are is the plugin's to say."""


@dataclass(slots=True)
class Sums:
    """What one request took.

    Attributes:
        prompt: Tokens its prefill ran.
        seconds: Clock -> what was timed -> seconds, all layers and calls together.
        calls: What was timed -> how often it was called.
    """

    prompt: int = 0
    seconds: dict[str, dict[str, float]] = field(
        default_factory=lambda: {clock: defaultdict(float) for clock in CLOCKS}
    )
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def prefill(self, clock: str) -> float:
        """Return the seconds of its prefill without what watches it."""
        seconds = self.seconds[clock]
        return seconds["prefill"] - seconds["watch"]

    def outside(self, clock: str) -> float:
        """Return the seconds compressing took once its prefill was done."""
        seconds = self.seconds[clock]
        return seconds["probes"] + seconds["probe"] + seconds["split"]


def read_sums(file: Path) -> list[Sums]:
    """Sum the events of requests that were served one after the other.

    Raises:
        ValueError: Something was timed before any prefill began.
    """
    requests: list[Sums] = []
    waiting: list[dict[str, float | str]] = []
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
        outside = run.outside("cpu")
        found["outside_ratio"].append(outside / prefill)
        found["outside_ratio_wall"].append(run.outside("wall") / run.prefill("wall"))
        watched = run.seconds["cpu"]["watch"]
        found["compress_ratio"].append((outside + watched) / prefill)
    ratios = found["compress_ratio"]
    return {
        **{name: statistics.median(values) for name, values in sorted(found.items())},
        "compress_ratio_least": min(ratios),
        "compress_ratio_most": max(ratios),
    }


def _add(request: Sums, events: list[dict[str, float | str]]) -> None:
    for event in events:
        what = str(event["what"])
        request.calls[what] += 1
        for clock in CLOCKS:
            request.seconds[clock][what] += float(event[clock])
