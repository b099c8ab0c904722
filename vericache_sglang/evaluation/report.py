"""A benchmark's results as JSON and as a Markdown page."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.figures import DEFINITIONS
from vericache_sglang.evaluation.options import label

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from vericache_sglang.evaluation.systems import System


def as_json(
    options: argparse.Namespace,
    systems: Sequence[System],
    results: Mapping[str, dict[str, Any]],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Return everything that is known of a run, as plain values.

    Args:
        options: The command line.
        systems: What was compared.
        results: Of each, by name; see ``Experiment.results``.
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
            system.name: {**asdict(system), **results[system.name]}
            for system in systems
        },
    }


def page(report: Mapping[str, Any]) -> str:
    """Return the Markdown page of a report made by ``as_json``."""
    systems = report["systems"]
    parts = [
        _head(report),
        _section(report, "Speed", _speed(systems)),
        _section(report, "Drafting, traffic and answers", _drafting(systems)),
    ]
    if any(len(row["tuning"]) > 1 for row in systems.values()):
        parts.append(_section(report, "Clients at once", _tuning(systems)))
    if any(row["open_loop"] for row in systems.values()):
        parts.append(_section(report, "Open loop", _open_loop(systems)))
    if any(row["divergence"] for row in systems.values()):
        parts.append(_section(report, "Distance from the full KV", _distance(systems)))
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


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _speed(systems: Mapping[str, dict[str, Any]]) -> str:
    titles = ["system", "clients", "tokens/s", "ratio", "TTFT p50, p90, p99 s"]
    titles += ["between tokens p50, p90, p99 ms", "whole answer p50, p99 s"]
    rows = []
    for name, row in systems.items():
        rows.append(
            [
                name,
                str(row["concurrency"]),
                _middle(row["tokens_per_s"], 1),
                _middle(row["ratio"], 2),
                _shares(row["ttft_s"], (50, 90, 99), 1.0, 2),
                _shares(row["itl_s"], (50, 90, 99), 1e3, 1),
                _shares(row["latency_s"], (50, 99), 1.0, 2),
            ]
        )
    return _table(titles, rows)


def _drafting(systems: Mapping[str, dict[str, Any]]) -> str:
    titles = ["system", "accepted per verify", "p10, p50", "moved B/token", "link %"]
    titles += ["KV read %", "mismatches", "failed requests"]
    rows = []
    for name, row in systems.items():
        differ = row["mismatches"]
        asked = sum(each["requests"] for each in row["rounds"])
        rows.append(
            [
                name,
                _number(row["accepted_per_verify"], 2),
                _shares(row["accepted"], (10, 50), 1.0, 0),
                _number(row["moved_bytes_per_token"], 0),
                _number(row["link_share"], 1, 100),
                _number(row["kv_read_share"], 1, 100),
                "-" if differ is None else f"{differ} of {asked}",
                str(row["failed_requests"]),
            ]
        )
    return _table(titles, rows)


def _tuning(systems: Mapping[str, dict[str, Any]]) -> str:
    rows = [
        [name, str(tried["concurrency"]), _number(tried["tokens_per_s"], 1)]
        for name, row in systems.items()
        for tried in row["tuning"]
    ]
    return _table(["system", "clients", "tokens/s"], rows)


def _open_loop(systems: Mapping[str, dict[str, Any]]) -> str:
    titles = ["system", "requests/s", "tokens/s", "TTFT p50, p99 s"]
    titles += ["between tokens p50, p99 ms", "whole answer p50, p99 s", "failed"]
    rows = [
        [
            name,
            f"{each['rate']:g}",
            _number(each["tokens_per_s"], 1),
            _shares(each["ttft_s"], (50, 99), 1.0, 2),
            _shares(each["itl_s"], (50, 99), 1e3, 1),
            _shares(each["latency_s"], (50, 99), 1.0, 2),
            str(each["failed_requests"]),
        ]
        for name, row in systems.items()
        for each in row["open_loop"]
    ]
    return _table(titles, rows)


def _distance(systems: Mapping[str, dict[str, Any]]) -> str:
    titles = ["system", "nats/token", "most nats", "nats/request", "same argmax %"]
    titles += ["tokens", "top-k"]
    rows = []
    for name, row in systems.items():
        found = row["divergence"]
        if found and found["positions"]:
            rows.append(
                [
                    name,
                    _number(found["nats_per_token"], 4),
                    _number(found["max_nats"], 2),
                    _number(found["nats_per_request"], 2),
                    _number(found["same_argmax"], 1, 100),
                    str(found["positions"]),
                    str(found["top_k"]),
                ]
            )
    return _table(titles, rows)


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


def _middle(found: Mapping[str, float] | None, digits: int) -> str:
    if found is None:
        return "-"
    median, low, high = (f"{found[k]:.{digits}f}" for k in ("median", "min", "max"))
    return f"{median} ({low} to {high})"


def _shares(
    found: Mapping[str, float] | None, shares: Sequence[int], scale: float, digits: int
) -> str:
    if found is None:
        return "-"
    return ", ".join(f"{found[f'p{share}'] * scale:.{digits}f}" for share in shares)


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"
