"""One document, many questions: what is held once, and how soon answers begin.

    python scripts/bench_shared_prefix.py --out scripts/results/shared_prefix.json

Plain SGLang and VeriCache, complements on the host, answer the same questions by
turns, eight clients at once. Plain SGLang finds the document in its radix cache too.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from lossless.prompts import load_tokenizer, record_prompts
from lossless.provenance import provenance, publish
from lossless.requests import greedy
from lossless.runs import System
from lossless.serving import LiveSystem

ROOT = Path(__file__).parents[1]
HELD = (
    *("cache_draft_slots", "cache_complement_bytes", "cache_host_bytes"),
    *("cache_segments", "splits", "shared_reloads", "rounds", "mean_accepted"),
)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model")
    parser.add_argument("--tokens", type=int, default=7900, help="of the document")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--compressor", default="keynorm")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", help="also write the JSON to this file")
    return parser.parse_args()


def questions(options: argparse.Namespace) -> list[str]:
    """Ask about users of one document; only the question differs."""
    tokenizer = load_tokenizer(options.model)
    (text,) = record_prompts(tokenizer, [options.tokens], options.seed, calls=1)
    head, tail = text.rsplit("<|user|>", 1)
    users = re.findall(r"user (\d+)\|", head)
    rng = random.Random(options.seed)
    return [
        f"{head}<|user|>" + re.sub(r"\d+", rng.choice(users), tail, count=1)
        for _ in range(options.questions)
    ]


def systems(options: argparse.Namespace) -> list[System]:
    """Return plain SGLang and ours, with room for the document and all answers."""
    engine = {"max_total_tokens": 8 * options.tokens}
    settings = {
        "residency": "host",
        "compressor": options.compressor,
        "min_prompt": 256,
    }
    return [
        System(name="plain SGLang", settings=None, engine=engine),
        System(name="VeriCache", settings=settings, engine=engine),
    ]


def wave(options: argparse.Namespace, texts: list[str]) -> dict[str, Any]:
    """Return a wave of questions that come at once."""
    params = [greedy(options.output, ignore_eos=True) for _ in texts]
    return {"prompts": texts, "params": params, "timed": True}


def main() -> int:
    """Run and print; status 1 when an answer differs."""
    options = arguments()
    texts = questions(options)
    live = [
        LiveSystem(system, options.model, strict=False) for system in systems(options)
    ]
    first: dict[str, list[float]] = {each.system.name: [] for each in live}
    answers: dict[str, list[str]] = {each.system.name: [] for each in live}
    seconds = dict.fromkeys(first, 0.0)
    try:
        for each in live:
            each.answer(wave(options, texts[:1]))
        for at in range(0, len(texts), options.clients):
            order = live if at // options.clients % 2 else live[::-1]
            for each in order:
                name = each.system.name
                got, took, _ = each.answer(
                    wave(options, texts[at : at + options.clients])
                )
                first[name] += [answer["times"][0][0] for answer in got]
                answers[name] += [answer["text"] for answer in got]
                seconds[name] += took
        state = live[1].state()
    finally:
        for each in live:
            each.close()
    plain, ours = answers.values()
    different = sum(a != b for a, b in zip(plain, ours, strict=True))
    medians = {name: median(times) for name, times in first.items()}
    report = {
        **provenance(sys.argv[1:]),
        "model": options.model.name,
        "questions": len(texts),
        "clients": options.clients,
        "document_tokens": options.tokens,
        "answers_that_differ": different,
        "median_seconds_to_first_token": medians,
        "ratio_of_medians": medians["VeriCache"] / medians["plain SGLang"],
        "seconds_of_all": seconds,
        "held_after_all": {name: state[name] for name in HELD},
    }
    publish(report, options.out)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
