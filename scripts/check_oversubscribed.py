"""More requests than memory: all finish, with plain SGLang's tokens, in bounded memory.

    python scripts/check_oversubscribed.py --out scripts/results/oversubscribed.json

The pool holds a quarter of what the running requests would take on the full KV. The
reference is a plain SGLang server with room for all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from demo_model import records
from lossless.prompts import count_tokens, load_tokenizer
from lossless.provenance import provenance, publish
from lossless.requests import greedy
from lossless.runs import System
from lossless.serving import LiveSystem

ROOT = Path(__file__).parents[1]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model-long")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16, help="running requests")
    parser.add_argument("--context", type=int, default=2000, help="mean prompt tokens")
    parser.add_argument("--tokens", type=int, default=200, help="most output tokens")
    parser.add_argument("--times", type=float, default=4.0, help="over-subscription")
    parser.add_argument("--host-gb", type=float, default=0.5)
    parser.add_argument("--residencies", nargs="+", default=["host", "auto"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="also write the JSON to this file")
    return parser.parse_args()


def wave(options: argparse.Namespace) -> dict[str, Any]:
    """Draw prompts of half to one and a half times the mean, and output lengths."""
    tokenizer = load_tokenizer(options.model)
    rng = random.Random(options.seed)
    prompts, params = [], []
    for _ in range(options.requests):
        length = rng.randint(options.context // 2, options.context * 3 // 2)
        record = records.prompt_of_length(
            rng, length, lambda text: count_tokens(tokenizer, text), calls=4
        )
        prompts.append(record.text)
        tokens = rng.randint(options.tokens // 2, options.tokens)
        params.append(greedy(tokens, ignore_eos=True))
    return {"prompts": prompts, "params": params, "timed": True}


def start(options: argparse.Namespace, residency: str | None) -> LiveSystem:
    """Start a server; None is plain SGLang with room for everyone."""
    full = options.at_once * (options.context + options.tokens)
    slots = 4 * full if residency is None else int(full / options.times)
    engine = {
        "max_total_tokens": slots,
        "chunked_prefill_size": 2048,
        "max_running_requests": options.at_once,
    }
    settings = None
    if residency is not None:
        settings = {
            "residency": residency,
            "min_prompt": 256,
            "host_gb": options.host_gb,
            "staging_tokens": 4 * options.context,
        }
    name = residency or "plain SGLang"
    system = System(name=name, settings=settings, engine=engine)
    return LiveSystem(system, options.model)


def figures(
    answers: list[dict[str, Any]], seconds: float, state: dict[str, Any]
) -> dict[str, Any]:
    """Say how long requests took and waited, and what was held."""
    ends = sorted(answer["times"][-1][0] for answer in answers)
    gaps = [
        after - before
        for answer in answers
        for (before, _), (after, _) in zip(
            answer["times"], answer["times"][1:], strict=False
        )
    ]
    names = ("splits", "offloads", "pins", "parks", "resumes", "refused_moves")
    peaks = ("peak_running", "peak_drafting", "peak_staged_bytes", "peak_host_bytes")
    return {
        "seconds": seconds,
        "finished": len(ends),
        "last_finished_s": ends[-1],
        "longest_silence_s": max(gaps),
        **{name: state.get(name) for name in (*names, *peaks, "host_budget_bytes")},
    }


def main() -> int:
    """Run and print; status 1 when a request differs or is missing."""
    options = arguments()
    requests = wave(options)
    rows: dict[str, dict[str, Any]] = {}
    texts: dict[str, list[str]] = {}
    for residency in (None, *options.residencies):
        live = start(options, residency)
        try:
            answers, seconds, _ = live.answer(requests)
            name = live.system.name
            rows[name] = figures(answers, seconds, live.state())
            texts[name] = [answer["text"] for answer in answers]
        finally:
            live.close()
        print(name, json.dumps(rows[name]), file=sys.stderr)
    wanted = texts.pop("plain SGLang")
    different = {
        name: sum(a != b for a, b in zip(wanted, got, strict=True))
        for name, got in texts.items()
    }
    report = {
        **provenance(sys.argv[1:]),
        "model": options.model.name,
        "options": {k: v for k, v in vars(options).items() if k != "model"},
        "requests_that_differ": different,
        "systems": rows,
    }
    publish(report, options.out)
    return 1 if any(different.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
