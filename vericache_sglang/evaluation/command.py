"""``python -m vericache_sglang.bench``: measures; writes JSON, page and picture."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError, VeriCacheError
from vericache_sglang.evaluation.experiment import Experiment
from vericache_sglang.evaluation.fleet import Fleet
from vericache_sglang.evaluation.options import check, draw_requests, label, parser
from vericache_sglang.evaluation.picture import draw, require_matplotlib
from vericache_sglang.evaluation.provenance import provenance
from vericache_sglang.evaluation.report import as_json, page

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.systems import System


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark.

    Args:
        argv: The command line without the program; None takes the process's own.

    Returns:
        0; 1 where a system was left out, a request failed, or an answer of a system
        that is not lossy differs from plain's; 2 for a wrong flag.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(arguments)
    try:
        systems = check(options)
        require_matplotlib()
        report = measure(options, systems, arguments)
        text = page(report)
        publish(options.out / "bench.json", json.dumps(report, indent=1) + "\n")
        publish(options.out / "bench.md", text)
        if any(row["tokens_per_s"] for row in report["systems"].values()):
            draw(report, options.out / "bench.png")
    except VeriCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
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
    origin = provenance(argv)
    if label(options):
        print(label(options), file=sys.stderr)
    fleet = Fleet(options)
    experiment = Experiment(options, systems, requests, fleet)
    with _ended_in_order():
        try:
            experiment.run()
        finally:
            fleet.close()
    return as_json(options, systems, experiment.results(), origin)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have SIGTERM run what stops the servers: they are in sessions of their own."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def publish(file: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        ConfigError: It cannot be written.
    """
    part = file.with_suffix(file.suffix + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)
    except OSError as error:
        raise ConfigError(f"--out: {file} cannot be written: {error}") from error


def _is_bad(row: Mapping[str, Any]) -> bool:
    differs = bool(row["mismatches"]) and not row["lossy"]
    return bool(row["skipped"] or row["failed_requests"] or differs)
