"""Never slower than plain SGLang: a sweep over context, concurrency, share and link.

    python scripts/bench_sweep.py --out scripts/results/never_slower.json
    python scripts/bench_sweep.py --points 200x1 2000x4 --keeps 0.25 --links 0

For every kept share and link speed one VeriCache server stands beside one plain SGLang
server; every point runs in alternating pairs, prefixes cached on both, and its figure
is the median of the pairs' ratios. Status 1 when an answer differed or a point is below
``--floor``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from lossless.prompts import load_tokenizer, record_prompts
from lossless.provenance import provenance, publish
from lossless.requests import greedy
from lossless.runs import System
from lossless.serving import LiveSystem

ROOT = Path(__file__).parents[1]
POINTS = (
    "200x1",
    "200x8",
    "1000x16",
    "2000x1",
    "2000x4",
    "6000x1",
    "6000x8",
    "16000x4",
)
"""Prompt tokens x requests at once."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model-long")
    parser.add_argument("--points", nargs="+", default=POINTS, help="CONTEXTxREQUESTS")
    parser.add_argument("--keeps", nargs="+", type=float, default=[0.25])
    parser.add_argument("--links", nargs="+", type=float, default=[0.0], help="GB/s")
    parser.add_argument("--residency", default="auto")
    parser.add_argument("--min-prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=200, help="output tokens each")
    parser.add_argument("--pairs", type=int, default=5, help="timed pairs per point")
    parser.add_argument("--pool", type=int, help="KV slots; default: all fit twice")
    parser.add_argument("--floor", type=float, default=0.97)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="also write the JSON to this file")
    return parser.parse_args()


def wave(options: argparse.Namespace, context: int, requests: int) -> dict[str, Any]:
    """Draw the requests of one point, the same for both systems."""
    prompts = record_prompts(
        load_tokenizer(options.model),
        [context] * requests,
        options.seed + context + requests,
        calls=min(6, max(1, context // 100)),
    )
    return {
        "prompts": prompts,
        "params": [greedy(options.tokens, ignore_eos=True)] * requests,
    }


def start(
    options: argparse.Namespace, settings: dict[str, Any] | None, size: tuple[int, int]
) -> LiveSystem:
    """Start one server that holds ``size`` (longest context, most requests)."""
    context, slots = size
    engine = {
        "max_total_tokens": options.pool or 2 * slots + 4096,
        "chunked_prefill_size": 2048,
        "context_length": context + options.tokens + 512,
        "max_running_requests": 16,
    }
    name = "VeriCache" if settings else "plain SGLang"
    system = System(name=name, settings=settings, engine=engine)
    return LiveSystem(system, options.model, strict=False)


def measure(
    plain: LiveSystem, ours: LiveSystem, requests: dict[str, Any], pairs: int
) -> dict[str, Any]:
    """Alternate the two systems on one point."""
    for live in (plain, ours):
        live.answer(requests)
    ratios, mismatches, grown = [], 0, {}
    for i in range(pairs):
        order = (plain, ours) if i % 2 == 0 else (ours, plain)
        runs = {live.system.name: live.answer(requests) for live in order}
        wanted, plain_s, _ = runs[plain.system.name]
        got, our_s, grown = runs[ours.system.name]
        ratios.append(plain_s / our_s)
        mismatches += sum(
            a["ids"] != b["ids"] for a, b in zip(wanted, got, strict=True)
        )
    rounds = grown.get("rounds", 0)
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "plain_seconds": plain_s,
        "mismatched_requests": mismatches,
        "drafted_rounds": rounds,
        "accepted_per_round": grown.get("accepted", 0) / rounds if rounds else None,
        "steps_aside": grown.get("steps_aside"),
    }


def sweep(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every point under every kept share and link."""
    points = [tuple(map(int, point.split("x"))) for point in options.points]
    size = (
        max(context for context, _ in points),
        max(
            requests * (context + options.tokens + 100) for context, requests in points
        ),
    )
    waves = {point: wave(options, *point) for point in points}
    found = []
    plain = start(options, None, size)
    try:
        for keep, link in [(k, g) for k in options.keeps for g in options.links]:
            settings = {
                "keep": keep,
                "link_gbps": link,
                "residency": options.residency,
                "min_prompt": options.min_prompt,
                "host_gb": 8.0,
            }
            ours = start(options, settings, size)
            try:
                for point in points:
                    row = {
                        "context": point[0],
                        "requests": point[1],
                        "keep": keep,
                        "link_gbps": link,
                        **measure(plain, ours, waves[point], options.pairs),
                    }
                    found.append(row)
                    print(json.dumps(row), file=sys.stderr)
            finally:
                ours.close()
    finally:
        plain.close()
    return found


def main() -> int:
    """Sweep and print; status 1 when a point fails."""
    options = arguments()
    rows = sweep(options)
    report = {
        **provenance(sys.argv[1:]),
        "model": options.model.name,
        "worst_ratio": min(row["ratio"] for row in rows),
        "mismatched_requests": sum(row["mismatched_requests"] for row in rows),
        "points": rows,
    }
    publish(report, options.out)
    bad = report["mismatched_requests"] or report["worst_ratio"] < options.floor
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
