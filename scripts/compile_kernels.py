"""Compile every Triton kernel for GPUs that are not there; registers, memory, spills.

    python scripts/compile_kernels.py --out scripts/results/kernel_compile
    python scripts/compile_kernels.py --arch 90 --only "KIVI 2 bits"

Prints a table in Markdown; ``--out`` writes it as ``.md`` beside a ``.json``. The
figures are the assembler's, not a measurement: they say what fits, not how fast it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from vericache_kernels.compile_report import ARCHITECTURES, compile_build
from vericache_kernels.compile_report.builds import builds
from vericache_sglang.provenance import provenance

COLUMNS = {
    "registers": "registers",
    "spill_bytes": "spills, B",
    "stack_bytes": "stack, B",
    "shared_bytes": "shared, B",
    "programs": "programs per SM",
    "cubin_bytes": "binary, B",
}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=ARCHITECTURES,
        default=ARCHITECTURES,
        help="compute capabilities times ten; default: all",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="names of builds; default: all"
    )
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="write PATH.json and PATH.md"
    )
    return parser.parse_args()


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows of one architecture in Markdown."""
    lines = ["| kernel | " + " | ".join(COLUMNS.values()) + " |"]
    lines.append("|---|" + "---|" * len(COLUMNS))
    for row in rows:
        cells = [f"{row[column]:,}" for column in COLUMNS]
        lines.append(f"| {row['build']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Compile, print and write; 1 where a kernel spills."""
    options = arguments()
    # Its compiler would ask; the run of a kernel has the same default.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    known = builds()
    unknown = set(options.only or ()) - set(known)
    if unknown:
        sys.exit(f"--only: no build is called {sorted(unknown)}; known: {list(known)}")
    rows = []
    for architecture in options.arch:
        for name in options.only or known:
            figures = compile_build(known[name], architecture)
            row = {"arch": architecture, "build": name, **dataclasses.asdict(figures)}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    import triton

    texts = [
        f"## sm_{architecture}\n\n"
        + table([row for row in rows if row["arch"] == architecture])
        for architecture in options.arch
    ]
    print("\n\n".join(texts))
    if options.out:
        about = provenance(sys.argv[1:], "python scripts/compile_kernels.py")
        about["versions"]["triton"] = triton.__version__
        _write(options.out, about, rows, texts)
    return int(any(row["spill_bytes"] for row in rows))


def _write(
    out: Path, about: dict[str, Any], rows: list[dict[str, Any]], texts: list[str]
) -> None:
    """Write the results, with where they come from."""
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {**about, "rows": rows}
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    head = [
        "# Kernels, as compiled",
        "COMPILED, not run: what the assembler says, without a GPU. A program is "
        "4 warps (8 for join planes, 1 for board "
        "commit); D = 128, bfloat16, 8 KV heads, 4 query heads each, one query, where "
        "the name does not say otherwise.",
        f"    {about['command']}",
        f"Triton {about['versions']['triton']}, torch {about['versions']['torch']}.",
    ]
    out.with_suffix(".md").write_text("\n\n".join([*head, *texts]) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
