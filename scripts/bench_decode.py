"""Decode speed of plain SGLang and VeriCache, alternately in one run.

    python scripts/bench_decode.py                      # 16K context, 8 requests
    python scripts/bench_decode.py --context 200 --requests 1 --tokens 128

Both engines stay up with the same arguments; every prompt's prefill is in both prefix
caches before anything is timed, so what is measured is decoding. Prints one JSON object
and writes it with ``--out``.
"""

from __future__ import annotations

import argparse
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


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model-long")
    parser.add_argument("--context", type=int, default=16000, help="prompt tokens")
    parser.add_argument("--requests", type=int, default=8, help="at once")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens each")
    parser.add_argument("--keep", type=float, default=0.125)
    parser.add_argument("--draft-length", type=int, default=32)
    parser.add_argument("--max-verifies", type=int, default=2)
    parser.add_argument("--compressor", default="snapkv")
    parser.add_argument("--calls", type=int, default=6, help="tool calls per answer")
    parser.add_argument("--pairs", type=int, default=3, help="timed pairs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="also write the JSON to this file")
    return parser.parse_args()


def wave(options: argparse.Namespace) -> dict[str, Any]:
    """Draw the requests, the same for both systems."""
    prompts = record_prompts(
        load_tokenizer(options.model),
        [options.context] * options.requests,
        options.seed,
        calls=min(options.calls, max(1, options.context // 100)),
    )
    params = [greedy(options.tokens, ignore_eos=True) for _ in prompts]
    return {"prompts": prompts, "params": params}


def systems(options: argparse.Namespace) -> tuple[System, System]:
    """Describe the two systems; they differ in VeriCache only."""
    room = options.requests * (options.context + options.tokens + 200) + 4096
    engine = {
        "max_total_tokens": 2 * room,
        "chunked_prefill_size": 2048,
        "context_length": options.context + options.tokens + 512,
        "max_running_requests": max(2, options.requests),
    }
    settings = {
        "compressor": options.compressor,
        "keep": options.keep,
        "draft_length": options.draft_length,
        "max_verifies": options.max_verifies,
        "host_gb": 8.0,
    }
    return (
        System(name="plain SGLang", settings=None, engine=engine),
        System(name="VeriCache", settings=settings, engine=engine),
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the pairs and return the figures."""
    requests = wave(options)
    plain, ours = (
        LiveSystem(system, options.model, strict=False) for system in systems(options)
    )
    pairs, mismatches, grown = [], 0, {}
    try:
        for live in (plain, ours):
            print(f"{live.system.name}: filling the prefix cache", file=sys.stderr)
            live.answer(requests)
        for i in range(options.pairs):
            wanted, plain_seconds, _ = plain.answer(requests)
            got, our_seconds, grown = ours.answer(requests)
            mismatches += sum(
                a["ids"] != b["ids"] for a, b in zip(wanted, got, strict=True)
            )
            tokens = sum(len(answer["ids"]) for answer in wanted)
            pairs.append((tokens / plain_seconds, tokens / our_seconds))
            print(
                f"pair {i + 1}/{options.pairs}: plain {pairs[-1][0]:.1f} tok/s, "
                f"VeriCache {pairs[-1][1]:.1f} tok/s",
                file=sys.stderr,
            )
    finally:
        plain.close()
        ours.close()
    rounds = grown.get("rounds", 0)
    return {
        "plain_tokens_per_s": statistics.median(a for a, _ in pairs),
        "vericache_tokens_per_s": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
        "ratios": [b / a for a, b in pairs],
        "mismatched_requests": mismatches,
        "accepted_per_round": grown.get("accepted", 0) / rounds if rounds else None,
        "drafted_per_round": grown.get("drafted", 0) / rounds if rounds else None,
        "last_run_counters": grown,
    }


def main() -> int:
    """Measure and print; status 1 when an answer differed."""
    options = arguments()
    report = {
        **provenance(sys.argv[1:]),
        "model": options.model.name,
        "options": {
            key: value for key, value in vars(options).items() if key != "model"
        },
        **measure(options),
    }
    publish(report, options.out)
    return 1 if report["mismatched_requests"] else 0


if __name__ == "__main__":
    sys.exit(main())
