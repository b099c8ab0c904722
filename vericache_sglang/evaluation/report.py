"""Formats results as JSON and as a Markdown page, and writes them."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.figures import DEFINITIONS
from vericache_sglang.evaluation.options import label

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.systems import System

    Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]


def _text(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: str(row[key])


def _number(
    key: str, digits: int, scale: float = 1.0
) -> Callable[[Mapping[str, Any]], str]:
    def cell(row: Mapping[str, Any]) -> str:
        return "-" if row[key] is None else f"{row[key] * scale:.{digits}f}"

    return cell


def _middle(key: str, digits: int) -> Callable[[Mapping[str, Any]], str]:
    def cell(row: Mapping[str, Any]) -> str:
        if row[key] is None:
            return "-"
        parts = (row[key][name] for name in ("median", "min", "max"))
        return "{} ({} to {})".format(*(f"{part:.{digits}f}" for part in parts))

    return cell


def _shares(
    key: str, shares: Sequence[int], digits: int, scale: float = 1.0
) -> Callable[[Mapping[str, Any]], str]:
    def cell(row: Mapping[str, Any]) -> str:
        if row[key] is None:
            return "-"
        values = (row[key][f"p{share}"] * scale for share in shares)
        return ", ".join(f"{value:.{digits}f}" for value in values)

    return cell


def _mismatches(row: Mapping[str, Any]) -> str:
    differ, asked = row["mismatches"], sum(each["requests"] for each in row["rounds"])
    return "-" if differ is None else f"{differ} of {asked}"


SPEED: Columns = {
    "clients": _text("concurrency"),
    "tokens/s": _middle("tokens_per_s", 1),
    "ratio": _middle("ratio", 2),
    "TTFT p50, p90, p99 s": _shares("ttft_s", (50, 90, 99), 2),
    "between tokens p50, p90, p99 ms": _shares("itl_s", (50, 90, 99), 1, 1e3),
    "whole answer p50, p99 s": _shares("latency_s", (50, 99), 2),
}
DRAFTING: Columns = {
    "accepted per verify": _number("accepted_per_verify", 2),
    "p10, p50": _shares("accepted", (10, 50), 0),
    "proposals accepted per row": _number("proposals_per_row", 2),
    "moved B/token": _number("moved_bytes_per_token", 0),
    "link %": _number("link_share", 1, 100),
    "KV read %": _number("kv_read_share", 1, 100),
    "mismatches": _mismatches,
    "failed requests": _text("failed_requests"),
}
TUNING: Columns = {
    "clients": _text("concurrency"),
    "tokens/s": _number("tokens_per_s", 1),
}
OPEN_LOOP: Columns = {
    "requests/s": lambda row: f"{row['rate']:g}",
    "tokens/s": _number("tokens_per_s", 1),
    "TTFT p50, p99 s": _shares("ttft_s", (50, 99), 2),
    "between tokens p50, p99 ms": _shares("itl_s", (50, 99), 1, 1e3),
    "whole answer p50, p99 s": _shares("latency_s", (50, 99), 2),
    "failed": _text("failed_requests"),
}
DISTANCE: Columns = {
    "nats/token": _number("nats_per_token", 4),
    "most nats": _number("max_nats", 2),
    "nats/request": _number("nats_per_request", 2),
    "same argmax %": _number("same_argmax", 1, 100),
    "tokens": _text("positions"),
    "top-k": _text("top_k"),
}
"""Tables of the page: heading of a column -> its cell."""


def as_json(
    options: argparse.Namespace,
    systems: Sequence[System],
    results: Mapping[str, dict[str, Any]],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the report of a run as plain values.

    Args:
        options: The command line.
        systems: The compared systems.
        results: Results by system name; see ``Experiment.results``.
        origin: See ``provenance``.
    """
    given = vars(options).items()
    return {
        "label": label(options),
        "provenance": dict(origin),
        "options": {
            name: value if isinstance(value, (int, float, list)) else str(value)
            for name, value in given
            if value is not None
        },
        "definitions": dict(DEFINITIONS),
        "systems": {
            system.name: {
                **asdict(system),
                "lossy": system.lossy,
                **results[system.name],
            }
            for system in systems
        },
    }


def page(report: Mapping[str, Any]) -> str:
    """Return the Markdown page of a report made by ``as_json``."""
    systems = report["systems"]
    parts = [
        _head(report),
        _section(report, "Speed", systems_table([*systems.items()], SPEED)),
        _section(
            report,
            "Drafting, traffic and answers",
            systems_table([*systems.items()], DRAFTING),
        ),
    ]
    for title, columns, key in (
        ("Clients at once", TUNING, "tuning"),
        ("Open loop", OPEN_LOOP, "open_loop"),
    ):
        rows = [(name, each) for name, row in systems.items() for each in row[key]]
        if rows:
            parts.append(_section(report, title, systems_table(rows, columns)))
    rows = [(name, row["divergence"]) for name, row in systems.items()]
    if rows := [(name, found) for name, found in rows if found and found["positions"]]:
        parts.append(
            _section(report, "Distance from the full KV", systems_table(rows, DISTANCE))
        )
    parts.append(_failures(systems))
    meanings = [f"- `{name}`: {text}." for name, text in DEFINITIONS.items()]
    parts.append("## What the figures are\n\n" + "\n".join(meanings))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: Mapping[str, Any]) -> str:
    origin, options = report["provenance"], report["options"]
    hardware = origin["hardware"]
    machine = [f"{hardware['cpu']}, {hardware['cores']} cores"]
    machine += [f"{hardware['memory_gb']} GB", *hardware["gpus"]]
    versions = ", ".join(f"{k} {v}" for k, v in origin["versions"].items())
    loop = "prompts cached first" if options["prefill"] == "cached" else "prefill timed"
    alone = options["one_at_a_time"]
    up = "each server is started for its turn" if alone else "all servers stay up"
    lines = [
        "# Benchmark",
        *filter(None, [report["label"] and f"**{report['label']}**"]),
        f"    {origin['command']}",
        f"Commit {origin['commit']}, {origin['date']}. {', '.join(machine)}; "
        f"OMP threads {hardware['omp_threads']}, load average at the start "
        f"{hardware['load_average']}. {versions}.",
        f"Greedy requests, the same list for every system in every round; {loop}; the "
        "prefix cache is emptied before each pass; the systems take turns, rounds: "
        f"{options['repeats']}; {up}. Ratios are to plain in the same round: "
        "median (least to greatest). A server on a URL may be on another machine.",
        "\n".join(
            f"- `{name}`: {row['about']}"
            + (f" (`{' '.join(row['flags'])}`)" if row["flags"] else "")
            for name, row in report["systems"].items()
        ),
        f"Flags of every server: `{options['engine'] or 'none'}`; before its own, of "
        f"every one that drafts: `{options['vericache'] or 'none'}`.",
    ]
    return "\n\n".join(lines)


def _section(report: Mapping[str, Any], title: str, table: str) -> str:
    mark = " (SIMULATED ACCEPTANCE)" if report["label"] else ""
    return f"## {title}{mark}\n\n{table}"


def systems_table(
    rows: Sequence[tuple[str, Mapping[str, Any]]], columns: Columns
) -> str:
    """Return a table of (system, figures) pairs."""
    cells = [[name, *(cell(row) for cell in columns.values())] for name, row in rows]
    return markdown_table(["system", *columns], cells)


def _failures(systems: Mapping[str, dict[str, Any]]) -> str:
    lines = [
        f"- `{name}` was left out: {row['skipped']}"
        for name, row in systems.items()
        if row["skipped"]
    ]
    lines += [
        f"- `{name}`: {text}" for name, row in systems.items() for text in row["errors"]
    ]
    return "## Failures\n\n" + "\n".join(lines) if lines else ""


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with padded columns, readable as plain text."""
    cells = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def publish(file: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        ConfigError: It cannot be written.
    """
    part = file.with_suffix(file.suffix + ".part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)
    except OSError as error:
        raise ConfigError(f"--out: {file} cannot be written: {error}") from error
