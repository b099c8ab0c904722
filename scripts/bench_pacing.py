"""Staggered against lock-step and sequential verification, same load, same link.

    python scripts/bench_pacing.py --out scripts/results/pacing.json

Every complement is on the host and the host link is emulated (a memcpy thread at
``--link-gbps``). One server after the other answers the same requests, streamed.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from lossless.prompts import load_tokenizer, record_prompts
from lossless.provenance import provenance, publish
from lossless.requests import greedy
from lossless.runs import System
from lossless.serving import LiveSystem

ROOT = Path(__file__).parents[1]
PACINGS = ("staggered", "lockstep", "sequential")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model-long")
    parser.add_argument("--context", type=int, default=8000, help="prompt tokens")
    parser.add_argument("--requests", type=int, default=8, help="at once")
    parser.add_argument("--tokens", type=int, default=240, help="output tokens each")
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--draft-length", type=int, default=32)
    parser.add_argument("--link-gbps", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="also write the JSON to this file")
    return parser.parse_args()


def wave(options: argparse.Namespace) -> dict[str, Any]:
    """Draw the requests, the same for every policy."""
    prompts = record_prompts(
        load_tokenizer(options.model),
        [options.context] * options.requests,
        options.seed,
        calls=6,
    )
    params = [greedy(options.tokens, ignore_eos=True)] * options.requests
    return {"prompts": prompts, "params": params, "timed": True}


def system(options: argparse.Namespace, pacing: str | None) -> System:
    """Describe a server; None is plain SGLang."""
    room = options.requests * (options.context + options.tokens + 200) + 4096
    engine = {
        "max_total_tokens": 2 * room,
        "chunked_prefill_size": 2048,
        "context_length": options.context + options.tokens + 512,
        "max_running_requests": max(2, options.requests),
    }
    if pacing is None:
        return System(name="plain SGLang", settings=None, engine=engine)
    everyone = pacing == "lockstep"
    settings = {
        "pacing": pacing,
        "residency": "host",
        "keep": options.keep,
        "draft_length": options.draft_length,
        "max_verifies": options.requests if everyone else 2,
        # Lock-step needs room for every complement at once; that is its cost.
        "staging_tokens": (options.requests if everyone else 2) * options.context,
        "link_gbps": options.link_gbps,
        "host_gb": 8.0,
    }
    return System(name=pacing, settings=settings, engine=engine)


def gaps(answers: list[dict[str, Any]]) -> list[float]:
    """Return the seconds between a request's chunks, spread over their tokens.

    A burst of k tokens after a gap of s seconds counts as k gaps: one of s, k - 1 of 0,
    which is what a reader waiting for the next token sees.
    """
    found = []
    for answer in answers:
        times = answer["times"]
        for (before, had), (after, has) in pairwise(times):
            found += [after - before] + [0.0] * (has - had - 1)
    return sorted(found)


def figures(
    options: argparse.Namespace, live: LiveSystem, requests: dict[str, Any]
) -> dict[str, Any]:
    """Run one policy a few times and return its figures."""
    live.answer(requests)
    runs = [live.answer(requests) for _ in range(options.repeats)]
    answers, seconds, grown = sorted(runs, key=lambda run: run[1])[len(runs) // 2]
    waits = gaps(answers)
    report: dict[str, Any] = {
        "texts": [answer["text"] for answer in answers],
        "tokens_per_s": options.requests * options.tokens / seconds,
        "inter_token_s_p50": waits[len(waits) // 2],
        "inter_token_s_p99": waits[int(0.99 * len(waits))],
        "inter_token_s_max": waits[-1],
    }
    if grown:
        rows = grown["draft_rows"] + grown["verify_rows"] + grown["waits"]
        link_s = grown["staged_bytes"] / (options.link_gbps * 1e9)
        report |= {
            "link_utilisation": link_s / seconds,
            "rows_computing": 1 - grown["waits"] / max(1, rows),
            "staged_bytes": grown["staged_bytes"],
            "peak_staged_bytes": live.state()["peak_staged_bytes"],
            "accepted_per_round": grown["accepted"] / max(1, grown["rounds"]),
            "slips": grown.get("slips"),
        }
    return report


def main() -> int:
    """Measure every policy and print; status 1 when an answer differed."""
    options = arguments()
    requests = wave(options)
    rows: dict[str, dict[str, Any]] = {}
    for pacing in (None, *PACINGS):
        live = LiveSystem(system(options, pacing), options.model, strict=False)
        try:
            rows[live.system.name] = figures(options, live, requests)
        finally:
            live.close()
        shown = {k: v for k, v in rows[live.system.name].items() if k != "texts"}
        print(live.system.name, json.dumps(shown), file=sys.stderr)
    texts = [row.pop("texts") for row in rows.values()]
    mismatches = sum(text != texts[0] for text in texts)
    base = rows["plain SGLang"]["tokens_per_s"]
    report = {
        **provenance(sys.argv[1:]),
        "model": options.model.name,
        "note": "the host link is emulated: a memcpy thread paced to link_gbps",
        "options": {k: v for k, v in vars(options).items() if k != "model"},
        "mismatched_systems": mismatches,
        "ratio_to_plain": {
            name: row["tokens_per_s"] / base for name, row in rows.items()
        },
        "systems": rows,
    }
    publish(report, options.out)
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
