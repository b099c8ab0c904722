"""The systems that the paper's figures are measured with, and what is read of them.

A figure names the rows that it reads; each row is one server, measured once for all
figures as ``bench pipeline1`` does. The demo model has an EAGLE3 head and answers with
single calls; demo-model-long answers with lists of calls, long enough for drafts of 30
tokens. A model given by ``--model`` is measured in both places.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.altered import LONGEST, LOSSY
from vericache_sglang.evaluation.benchmark import DEMO, DEMO_LONG
from vericache_sglang.evaluation.benchmarks.divergence import FULL, prepare
from vericache_sglang.evaluation.benchmarks.pipeline1 import (
    Series,
    lossless_systems,
    lossy_systems,
    measure,
    ours,
)
from vericache_sglang.evaluation.inner_drafters import NEVER, chosen
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.tasks.catalog import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.server import Starter
    from vericache_sglang.evaluation.systems import System

    Row = Mapping[str, Any]

RATES = (1.0, 2.0, 4.0)
"""Requests a second of figure 12."""

LENGTHS = (5, 15, 30)
"""Draft lengths that are measured, in tokens."""

CHAIN = 4
"""Proposals in every row of the drafters whose acceptance is measured."""

FOURFOLD = 0.25
"""Share of tokens kept at the paper's 4x compaction."""

EXTRAS: Mapping[str, str] = {
    "ExpectedAttention": "expected-attention",
    "SnapKV": "snapkv",
    "KVQuant": "kvquant:tables={tables}/kvquant-4bit.safetensors",
    "RotateKV": "rotatekv:tables={tables}/rotatekv.safetensors,bits=4,clip=1.0",
}
"""Figure 15's compressors; the tables of the last two are the demo model's."""

TABLES = DEMO / "calibration"


@dataclass(frozen=True, slots=True)
class SystemGroup:
    """Systems of one model on the same samples.

    Attributes:
        name: Ends the names of its rows.
        model: Folder; ``--model`` takes its place.
        listed: Its tasks: those whose twins are lists of calls, or the others.
        rates: Of its systems that are lossless, requests a second.
    """

    name: str
    model: Path
    listed: bool
    rates: tuple[float, ...] = ()

    def of(self, system: str) -> str:
        """Return the name of a system's row."""
        return f"{system}, {self.name}"


CALLS = SystemGroup("calls", DEMO, listed=False, rates=RATES)
LISTS = SystemGroup("lists", DEMO_LONG, listed=True)
FORCED = SystemGroup("always drafting", DEMO, listed=False)
"""Speed and acceptance only: drafts and chains as long as asked, paying or not."""

LONG_DRAFTS = SystemGroup("always drafting, lists", DEMO_LONG, listed=True)
GROUPS = (CALLS, FORCED, LISTS, LONG_DRAFTS)


@dataclass(frozen=True, slots=True)
class MeasuredColumn:
    """A measured column of a figure.

    Attributes:
        row: Name of the row it reads, or each point's.
        value: From the row and the point; None: unknown there.
    """

    row: str | Mapping[Any, str]
    value: Callable[[Row, Any], float | None]

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of all rows it reads."""
        return (self.row,) if isinstance(self.row, str) else tuple(self.row.values())

    def at(self, point: Any, rows: Mapping[str, Row]) -> float | None:
        """Return the value at a point; None without a row that was measured."""
        name = self.row if isinstance(self.row, str) else self.row.get(point, "")
        row = rows.get(name)
        return None if row is None or "error" in row else self.value(row, point)


def _part(found: Row | None, name: str) -> float | None:
    value: float | None = found[name] if found else None
    return value


def throughput(row: Row, point: Any) -> float | None:
    """Return tokens/s."""
    found = row["tokens_per_s"]
    return _part(found, "median")


def ratio(row: Row, point: Any) -> float | None:
    """Return tokens/s over the full KV's in the same round."""
    found = row["ratio"]
    return _part(found, "median")


def accepted(row: Row, point: Any) -> float | None:
    """Return drafts accepted per verification."""
    found: float | None = row["accepted_per_verify"]
    return found


def acceptance_rate(row: Row, point: Any) -> float | None:
    """Return accepted / drafted tokens."""
    counted = [each["counters"] for each in row["rounds"]]
    drafted = sum(each.get("drafted", 0) for each in counted)
    return sum(each["accepted"] for each in counted) / drafted if drafted else None


def proposals(row: Row, point: Any) -> float | None:
    """Return an inner drafter's proposals accepted per row."""
    found: float | None = row["proposals_per_row"]
    return found


def latency(row: Row, point: Any) -> float | None:
    """Return the median latency at a request rate, in seconds."""
    found = [each for each in row["open_loop"] if each["rate"] == point]
    return found[0]["latency_s"]["p50"] if found and found[0]["latency_s"] else None


def score(task: str, name: str) -> Callable[[Row, Any], float | None]:
    """Return what reads one figure of a task."""

    def read(row: Row, point: Any) -> float | None:
        found = row["tasks"].get(task, {}).get("scores", {}).get(name)
        return _part(found, "value")

    return read


def likeness(task: str, name: str) -> Callable[[Row, Any], float | None]:
    """Return what reads a likeness or distance of a task's answers."""

    def read(row: Row, point: Any) -> float | None:
        found = row["tasks"].get(task, {}).get(name)
        return _part(found, "value")

    return read


def accumulated(task: str) -> Callable[[Row, Any], float | None]:
    """Return what reads KL_1:t after ``point`` tokens; an ended sequence adds 0.

    Beyond the longest sequence nothing is known.
    """

    def read(row: Row, point: Any) -> float | None:
        steps = row["tasks"].get(task, {}).get("steps", [])
        if point > max(map(len, steps), default=0):
            return None
        return statistics.fmean(sum(each[:point]) for each in steps)

    return read


def measure_rows(
    wanted: Sequence[str],
    options: argparse.Namespace,
    results: Results,
    start: Starter | None = None,
) -> None:
    """Measure the rows that figures read, and plain SGLang's of their groups.

    Args:
        wanted: Names of rows.
        options: The command line, with ``SERVED``.
        results: Get the rows, failures and, in ``left_out``, missing drafters.
        start: See ``served``.
    """
    for group in GROUPS:
        mine = _given(group, options)
        systems = [
            system
            for system in _systems(group, mine)
            if group.of(system.name) in wanted
        ]
        if not mine.tasks or not (systems or group.of(FULL) in wanted):
            continue
        if not group.listed:
            results.figures["left_out"] |= chosen(mine)[1]
        series = Series(f", {group.name}", whole=group in (CALLS, LISTS))
        measure(prepare(mine), systems, results, start, series)


def _given(group: SystemGroup, options: argparse.Namespace) -> argparse.Namespace:
    tasks = [name for name in options.tasks if TASKS[name].listed == group.listed]
    more = {
        "model": options.model or group.model,
        "tasks": tasks,
        "rates": [*group.rates],
        "compressor": "kvzip",
        "keep": 0.2,
        "draft_length": 25,
        "offline": ["kvzip"],
        "keeps": [0.25, 0.5, 0.75],
        "online": [],
        "budgets": [],
        "quantizers": ["kivi"],
        "bits": [8, 4, 2],
    }
    return argparse.Namespace(**{**vars(options), **more})


def _systems(group: SystemGroup, options: argparse.Namespace) -> list[System]:
    """Return every system that a group may have."""
    fourfold = ours(options, compressor="kvzip", keep=FOURFOLD, residency="host")
    inner = chosen(options)[0]
    about = "drafts or chains as long as asked, whether they pay or not"
    if group in (FORCED, LONG_DRAFTS):
        found = [
            described(
                f"VeriCache, drafts of {length}",
                {**fourfold, "draft_length": length},
                alteration=LONGEST,
                about=about,
            )
            for length in LENGTHS
        ]
        for drafter in inner:
            chain = {"inner_length": CHAIN}
            composed = {**fourfold, "draft_length": LENGTHS[-1], **chain}
            names = (drafter.name, f"VeriCache + {drafter.name}")
            settings = ({"min_prompt": NEVER, **chain}, composed)
            found += [
                drafter.under(given, name, about, LONGEST)
                for name, given in zip(names, settings, strict=True)
            ]
        return found
    found = [*lossless_systems(options), *lossy_systems(options, 1.0)]
    found.append(
        described(
            "lossy turboquant, 2 bit",
            ours(options, compressor="turboquant:bits=2", keep=1.0, residency="host"),
            alteration=LOSSY,
        )
    )
    for name, line in EXTRAS.items():
        if "{tables}" in line and options.model.name != DEMO.name:
            continue
        compressor = line.format(tables=TABLES)
        keep = FOURFOLD if ":" not in line else 1.0
        mine = ours(options, compressor=compressor, keep=keep, draft_length=25)
        found.append(described(f"VeriCache over {name}", mine))
        alone = {**mine, "residency": "host"}
        found.append(described(f"lossy {name}", alone, alteration=LOSSY))
    return found
