"""Compares systems over HTTP; writes JSON, page and picture."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.experiment import Experiment
from vericache_sglang.evaluation.fleet import Fleet
from vericache_sglang.evaluation.options import (
    PROGRAM,
    check,
    draw_requests,
    label,
    parser,
)
from vericache_sglang.evaluation.picture import draw, require_matplotlib
from vericache_sglang.evaluation.report import as_json, page, publish
from vericache_sglang.provenance import provenance

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from vericache_sglang.evaluation.systems import System


def main(arguments: list[str], epilog: str) -> int:
    """Compare systems.

    Args:
        arguments: The command line without the program.
        epilog: Last words of ``--help``.

    Returns:
        0; 1 where a system was left out, a request failed, or an answer of a system
        that is not lossy differs from plain's.

    Raises:
        ConfigError: A flag is wrong, or a file cannot be read or written.
    """
    options = parser(epilog).parse_args(arguments)
    systems = check(options)
    require_matplotlib()
    report = measure(options, systems, arguments)
    text = page(report)
    publish(options.out / "bench.json", json.dumps(report, indent=1) + "\n")
    publish(options.out / "bench.md", text)
    if any(row["tokens_per_s"] for row in report["systems"].values()):
        draw(report, options.out / "bench.png")
    print(text)
    return 1 if any(map(_is_bad, report["systems"].values())) else 0


def measure(
    options: argparse.Namespace, systems: Sequence[System], argv: list[str]
) -> dict[str, Any]:
    """Run every system and return the report, of plain values.

    Args:
        options: Checked.
        systems: What ``check`` returned.
        argv: The command line, for the report.

    Raises:
        ConfigError: The requests cannot be read or drawn.
    """
    requests = draw_requests(options)
    origin = provenance(argv, PROGRAM)
    if label(options):
        print(label(options), file=sys.stderr)
    fleet = Fleet(options)
    experiment = Experiment(options, systems, requests, fleet)
    try:
        experiment.run()
    finally:
        fleet.close()
    return as_json(options, systems, experiment.results(), origin)


def _is_bad(row: Mapping[str, Any]) -> bool:
    differs = bool(row["mismatches"]) and not row["lossy"]
    return bool(row["skipped"] or row["failed_requests"] or differs)
