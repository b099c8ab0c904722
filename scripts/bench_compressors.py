"""Every compressor served: sizes, transfers, accepted drafts, answers on its own.

    python scripts/bench_compressors.py --out scripts/results/compressors.json
    python scripts/bench_compressors.py --lines snapkv kivi:bits=4 --keeps 0.25

One engine a line answers the same tool calls with the demo model at draft lengths 8,
16, 32 and 64, then once more with drafts unverified. ``--out`` is written after every
line, with a Markdown page beside it; the same command goes on where it was ended. Exit
status 1 if an answer is not that of the full KV.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from compressors_table.lines import DEFAULT, lines
from compressors_table.markdown import page
from compressors_table.measure import MODEL, ask, serve_full, serve_line
from lossless.prompts import count_tokens, load_tokenizer
from lossless.provenance import provenance
from lossless.runs import ROOT
from lossless.warm import WarmEngines

SAME = ("context", "each", "seed")
"""Options that a file to go on with must have been made with."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--lines", nargs="+", default=DEFAULT, help="as --vericache-compressor"
    )
    parser.add_argument(
        "--keeps", type=float, nargs="+", default=[0.25, 0.125], help="of selectors"
    )
    parser.add_argument("--context", type=int, default=4000, help="longest prompt")
    parser.add_argument(
        "--each", type=int, default=3, help="short prompts, and as many long ones"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws other documents")
    parser.add_argument("--out", type=Path, help="JSON; the page is written beside it")
    options = parser.parse_args()
    if options.out is not None:
        options.out = options.out.resolve()
    return options


def known(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of ``--out`` that need not be measured again.

    Raises:
        SystemExit: The file was made with other prompts.
    """
    if options.out is None or not options.out.exists():
        return []
    report = json.loads(options.out.read_text(encoding="utf-8"))
    for name in SAME:
        if report["options"][name] != getattr(options, name):
            raise SystemExit(
                f"{options.out.name} was made with --{name} "
                f"{report['options'][name]}, not {getattr(options, name)}: remove it "
                "or give another --out"
            )
    rows: list[dict[str, Any]] = report["lines"]
    return rows


def publish(report: dict[str, Any], out: Path | None) -> None:
    """Write the report and its page, whole or not at all."""
    if out is None:
        return
    texts = {
        out: json.dumps(report, indent=1) + "\n",
        out.with_suffix(".md"): page(report),
    }
    for file, text in texts.items():
        part = file.with_suffix(file.suffix + ".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)


def main() -> int:
    """Measure what is not known yet; see the module."""
    options = arguments()
    wanted = lines(options.lines, options.keeps)
    rows = {row["name"]: row for row in known(options)}
    tokenizer, asked = (
        load_tokenizer(MODEL),
        ask(options.context, options.each, options.seed),
    )
    origin = provenance(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        engines = WarmEngines(Path(folder, "warm.log"))
        try:
            full = serve_full(engines.run, asked, options.context)
            report: dict[str, Any] = {
                "provenance": origin,
                "options": {name: getattr(options, name) for name in SAME},
                "requests": len(asked.prompts),
                "prompt_tokens": [
                    count_tokens(tokenizer, prompt.text) for prompt in asked.prompts
                ],
                "full_kv": {"exact": full["exact"]},
            }
            for line in wanted:
                if line.name not in rows:
                    row = serve_line(engines.run, line, asked, options.context, full)
                    rows[line.name] = {**row, "commit": origin["commit"]}
                report["lines"] = in_order(rows, [line.name for line in wanted])
                publish(report, options.out)
                tell(rows[line.name])
        finally:
            engines.close()
    if options.out is None:
        print(page(report))
    return 1 if any(row["wrong"] for row in report["lines"]) else 0


def in_order(rows: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """Return all rows, those of ``names`` first and in their order."""
    first = [rows[name] for name in names if name in rows]
    return first + [row for name, row in rows.items() if name not in names]


def tell(row: dict[str, Any]) -> None:
    """Print one line of progress."""
    rounds = [sums["all"] for sums in row["lengths"].values()]
    print(
        f"{row['name']}: "
        + " / ".join(f"{sums['accepted'] / sums['rounds']:.1f}" for sums in rounds)
        + f", alone {row['exact_alone']} exact, {len(row['wrong'])} wrong, "
        f"{sum(row['seconds']):.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    with chdir(ROOT):
        sys.exit(main())
