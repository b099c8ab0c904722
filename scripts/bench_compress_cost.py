"""What compressing a prompt costs beside its prefill, line by line, in a live engine.

    python scripts/bench_compress_cost.py
    python scripts/bench_compress_cost.py --context 2000 --lines kvzip --rounds 5

One engine a round for plain SGLang and for every line, in turn; each serves a warm-up
and then every prompt once. Seconds are of the scheduler's thread, which other work on
the machine does not add to; wall seconds stand beside them. Prints a table, and writes
JSON with ``--out`` and the table beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from compress_cost.sums import Sums, medians, read_sums
from lossless.prompts import load_tokenizer, record_prompts
from lossless.provenance import provenance, publish
from lossless.requests import greedy
from lossless.runs import PATHS, System
from lossless.warm import WarmEngines

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "scripts/compress_cost/plugin"

PLAIN = "plain SGLang"
LINES = (
    "kvzip",
    "kvzip:plus=true",
    "kvzap:weights=configs/demo-model/kvzap-linear",
    "kvzap:weights=configs/demo-model/kvzap-mlp",
    "snapkv",
    "expected-attention",
    "kivi:bits=4",
    "split-planes:exponent_bits=3,mantissa_bits=1",
    "turboquant:bits=4",
)
"""Lines of ``--vericache-compressor``; paths are relative to the repository."""

WARM_UP = 500
"""Tokens of the prompt that nobody counts."""

COLUMNS = (
    ("prefill s", "prefill_cpu", 1.0),
    ("of plain", "prefill_of_plain", 1.0),
    ("watching %", "watch_share", 100.0),
    ("update %", "update_share", 100.0),
    ("probes s", "probe_cpu", 1.0),
    ("observe s", "observe_cpu", 1.0),
    ("split ms/1K", "split_per_1k", 1e3),
    ("scores ms/1K", "scores_per_1k", 1e3),
    ("packing ms/1K", "encode_per_1k", 1e3),
    ("all / prefill", "compress_ratio", 1.0),
    ("wall", "outside_ratio_wall", 1.0),
)
"""Heading, figure, factor."""

LEGEND = """Medians of {rounds} rounds on {model}; seconds of the scheduler's thread.
Prefill is without what watches it; watching includes update. Probes include observe.
Split (ms per 1,000 prompt tokens) includes scores, packing and the copies to the host.
All / prefill: watching, probes and split over the prefill they belong to; wall: probes
and split alone, by the clock.

"""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[2000, 8000], help="prompt tokens"
    )
    parser.add_argument("--lines", nargs="+", default=list(LINES))
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file; the table is beside it")
    return parser.parse_args()


def system(line: str, options: argparse.Namespace, events: Path) -> System:
    """Describe the engine of a line, or plain SGLang's; they differ in VeriCache."""
    most = max(options.context)
    settings = {
        "compressor": line,
        "keep": options.keep,
        "min_prompt": 64,
        "residency": "host",
        "draft_length": 8,
        "staging_tokens": 2 * most,
    }
    return System(
        name=line,
        settings=None if line == PLAIN else settings,
        engine={
            "chunked_prefill_size": 2048,
            "max_total_tokens": 4 * most + 8192,
            "disable_radix_cache": True,
        },
        environment={
            "PYTHONPATH": os.pathsep.join([str(PLUGIN), PATHS]),
            "VERICACHE_COST_EVENTS": str(events),
        },
    )


def measure(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Run the rounds; line -> prompt tokens asked for -> figures."""
    lengths = [WARM_UP, *options.context]
    prompts = record_prompts(
        load_tokenizer(options.model), lengths, options.seed, calls=1
    )
    wave = {
        "prompts": prompts,
        "params": [greedy(16, ignore_eos=True) for _ in prompts],
        "at_once": 1,
    }
    runs: dict[str, dict[str, list[Sums]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        engines = WarmEngines(Path(folder, "warm.log"))
        try:
            for i in range(options.rounds):
                for line in (PLAIN, *options.lines):
                    events = Path(folder, "events")
                    events.unlink(missing_ok=True)
                    engines.run(system(line, options, events), options.model, [wave])
                    sums = read_sums(events)[1:]
                    for length, request in zip(options.context, sums, strict=True):
                        runs[line][str(length)].append(request)
                    print(f"round {i + 1}: {line}", file=sys.stderr)
        finally:
            engines.close()
    return {
        line: {length: medians(found) for length, found in by_length.items()}
        for line, by_length in runs.items()
    }


def completed(
    figures: dict[str, dict[str, dict[str, float]]],
) -> dict[str, dict[str, dict[str, float]]]:
    """Add what compares with plain SGLang, and seconds per 1,000 tokens."""
    plain = figures[PLAIN]
    for by_length in figures.values():
        for length, found in by_length.items():
            base = plain[length]["prefill_cpu"]
            found["prefill_of_plain"] = found["prefill_cpu"] / base
            for part in ("split", "scores", "encode"):
                if f"{part}_cpu" in found:
                    found[f"{part}_per_1k"] = found[f"{part}_cpu"] / int(length) * 1000
    return figures


def table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a Markdown table of every line and length."""
    rows = [
        ["line", "tokens", *(heading for heading, _, _ in COLUMNS)],
        ["---"] * (2 + len(COLUMNS)),
    ]
    for line, by_length in figures.items():
        for length, found in by_length.items():
            cells = [
                f"{found[figure] * factor:.3g}" if figure in found else ""
                for _, figure, factor in COLUMNS
            ]
            rows.append([line, length, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def main() -> None:
    """Measure, print and write."""
    options = arguments()
    out = options.out.resolve() if options.out else None
    os.chdir(ROOT)  # lines name files relative to it
    figures = completed(measure(options))
    text = LEGEND.format(rounds=options.rounds, model=options.model.name)
    text += table(figures)
    print(text, file=sys.stderr)
    report: dict[str, Any] = {
        **provenance(sys.argv[1:]),
        "model": options.model.name,
        "rounds": options.rounds,
        "keep": options.keep,
        "figures": figures,
    }
    publish(report, str(out) if out else None)
    if out:
        out.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
