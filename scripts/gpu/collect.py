"""Merges the parts of a GPU run into one results file and its Markdown page.

    python scripts/gpu/collect.py [--out DIR] [--results DIR]

Writes ``<device>-<date>.json`` and ``.md``; a rehearsal's names begin with REHEARSAL.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import journal
from gpu.pages import page
from gpu.part import ROOT
from gpu.parts import PARTS


def merge(out: Path) -> dict[str, Any]:
    """Return the parts of a folder as one report.

    Raises:
        SystemExit: There is none, or they are of several devices.
    """
    parts = {
        name: found
        for name in PARTS
        if (found := journal.read(journal.file_of(out, name))).get("stamp")
    }
    if not parts:
        sys.exit(f"{out} has no results; scripts/gpu/run.py makes them")
    stamps = [part["stamp"] for part in parts.values()]
    devices = sorted({stamp["device"] for stamp in stamps})
    if len(devices) > 1:
        sys.exit(f"{out} has results of several devices: {', '.join(devices)}")
    return {
        "device": devices[0],
        "date": max(stamp["date"] for stamp in stamps)[:10],
        "label": max(stamp["label"] for stamp in stamps),
        "commits": sorted({stamp["commit"] for stamp in stamps}),
        "sources": sorted({stamp["source"] for stamp in stamps}),
        "parts": parts,
    }


def name_of(report: dict[str, Any]) -> str:
    """Return the name of a report's files, without a suffix."""
    device = re.sub(r"[^a-z0-9]+", "-", report["device"].lower()).strip("-")
    marked = "REHEARSAL-" if report["label"] else ""
    return f"{marked}{device}-{report['date']}"


def main(argv: list[str] | None = None) -> int:
    """Write both files; 1 where a part is missing, unfinished or failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--results", type=Path, default=ROOT / "scripts/results")
    options = parser.parse_args(argv)
    report = merge(options.out)
    base = options.results / name_of(report)
    journal.write(base.with_suffix(".json"), report)
    base.with_suffix(".md").write_text(page(report), encoding="utf-8")
    print(page(report))
    print(f"{base}.json, {base}.md")
    states = {name: part["status"] for name, part in report["parts"].items()}
    return 0 if states == dict.fromkeys(PARTS, "ok") else 1


if __name__ == "__main__":
    sys.exit(main())
