"""A working set far above the host budget, for minutes: nothing fails, nothing grows.

    python scripts/soak_cached_prefixes.py --out scripts/results/prefix_soak.json

Documents whose KV is sixteen times the host budget are asked about at random, some far
more often than others. The pool holds two of them. Every answer is compared with plain
SGLang's, and the memory of the engine's processes is read after every wave.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from lossless.prompts import load_tokenizer, record_prompts
from lossless.provenance import provenance, publish
from lossless.requests import greedy
from lossless.runs import System
from lossless.serving import LiveSystem

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
TOKEN_BYTES = 4096
"""KV of a token of the demo model in float32."""
WARM_SHARE = 0.2
"""Share of the time after which memory is compared: every tier is full by then."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--budget-mb", type=float, default=64.0)
    parser.add_argument("--working-set-mb", type=float, default=1024.0)
    parser.add_argument("--tokens", type=int, default=4096, help="of a document")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--compressor", default="keynorm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="also write the JSON to this file")
    return parser.parse_args()


def wave(texts: list[str]) -> dict[str, Any]:
    """Return requests that come at once."""
    return {"prompts": texts, "params": [greedy(8, ignore_eos=True) for _ in texts]}


def resident_mib() -> float:
    """Return the memory of all processes below this one, in MiB."""
    below = psutil.Process().children(recursive=True)
    return sum(process.memory_info().rss for process in below) / MIB


def wanted(options: argparse.Namespace, documents: list[str]) -> list[str]:
    """Answer every document with plain SGLang."""
    engine = {"max_total_tokens": 8 * options.tokens, "disable_radix_cache": True}
    live = LiveSystem(
        System(name="plain SGLang", settings=None, engine=engine), options.model
    )
    try:
        return [live.answer(wave([text]))[0][0]["text"] for text in documents]
    finally:
        live.close()


def soak(
    options: argparse.Namespace, documents: list[str], texts: list[str]
) -> dict[str, Any]:
    """Ask until the time is over; return what was seen."""
    engine = {
        "max_total_tokens": int(2.5 * options.tokens),
        "max_running_requests": options.at_once,
    }
    settings = {
        "residency": "host",
        "compressor": options.compressor,
        "min_prompt": 256,
        "host_gb": options.budget_mb / 1024,
    }
    live = LiveSystem(
        System(name="VeriCache", settings=settings, engine=engine), options.model
    )
    rng = random.Random(options.seed)
    asked = different = failed = 0
    memory: list[tuple[float, float]] = []
    began = time.monotonic()
    try:
        while (passed := time.monotonic() - began) < 60 * options.minutes:
            # Squaring makes the first documents the ones asked about most.
            picks = [
                int(len(documents) * rng.random() ** 2) for _ in range(options.at_once)
            ]
            answers, _, _ = live.answer(wave([documents[i] for i in picks]))
            asked += len(picks)
            for pick, answer in zip(picks, answers, strict=True):
                failed += answer["finish_reason"]["type"] != "length"
                different += answer["text"] != texts[pick]
            memory.append((passed, resident_mib()))
        state = live.state()
    finally:
        live.close()
    warm = [mib for at, mib in memory if at > WARM_SHARE * 60 * options.minutes]
    names = [name for name in state if name.startswith("cache_")]
    return {
        "requests": asked,
        "failed": failed,
        "answers_that_differ": different,
        "resident_mib": {
            "first": memory[0][1],
            "warm": warm[0],
            "last": warm[-1],
            "least_when_warm": min(warm),
            "most_when_warm": max(warm),
        },
        "host_used_bytes": state["host_used_bytes"],
        "host_budget_bytes": state["host_budget_bytes"],
        **{name: state[name] for name in names},
    }


def main() -> int:
    """Run and print; status 1 when a request failed or differs."""
    options = arguments()
    count = int(options.working_set_mb * MIB / TOKEN_BYTES / options.tokens)
    tokenizer = load_tokenizer(options.model)
    lengths = [options.tokens] * count
    documents = record_prompts(tokenizer, lengths, options.seed, calls=1)
    seen = soak(options, documents, wanted(options, documents))
    report = {
        **provenance(sys.argv[1:]),
        "model": options.model.name,
        "documents": count,
        "tokens_of_each": options.tokens,
        **seen,
    }
    publish(report, options.out)
    return 1 if seen["failed"] or seen["answers_that_differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
