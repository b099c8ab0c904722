"""Malformed bodies and aborted streams: nothing breaks, leaks or answers differently.

    python scripts/fuzz_http.py --out scripts/results/fuzz.json

Two servers are started, ours and plain SGLang, and get the same bodies. ``--url``
attacks a server that is there already; its answers from before are the reference.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing.attack import attack, references
from fuzzing.bodies import draw
from fuzzing.left_out import LEFT_OUT
from fuzzing.streams import streams
from fuzzing.target import OURS, PLAIN, Target, start, wait
from lossless.prompts import load_tokenizer, record_prompts
from lossless.provenance import provenance, publish

ROOT = Path(__file__).parents[1]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model")
    parser.add_argument("--url", help="attack this server, start none")
    parser.add_argument("--only-plain", action="store_true", help="attack plain SGLang")
    parser.add_argument("--bodies", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=24, help="running requests")
    parser.add_argument("--first", type=int, default=0, help="skip bodies before it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="also write the JSON to this file")
    return parser.parse_args()


async def fuzz(options: argparse.Namespace, targets: list[Target]) -> dict[str, Any]:
    """Attack ``targets[0]`` and return what was seen."""
    tokenizer = load_tokenizer(options.model)
    lengths = [100 + 20 * i for i in range(16)]
    prompts = record_prompts(tokenizer, lengths, options.seed)
    bodies = draw(options.seed, options.bodies, prompts)[options.first :]
    await asyncio.gather(*(wait(target) for target in targets))
    texts = await references(targets[-1], prompts)
    probes = dict(zip(prompts, texts, strict=True))
    began = time.monotonic()
    tally = await attack(targets, bodies, probes)
    print(
        f"bodies: {tally.statuses} in {time.monotonic() - began:.0f} s", file=sys.stderr
    )
    held = await targets[0].settle()
    ends, wrong = await streams(targets[0], options.streams, probes, options.seed)
    held_after = await targets[0].settle()
    for target in targets:
        target.require_alive()
    again = await references(targets[0], prompts)
    counters = targets[0].counters()
    names = ("drafted", "accepted", "splits", "offloads", "parks", "resumes")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "statuses": {str(key): tally.statuses[key] for key in sorted(tally.statuses)},
        "healthy_requests_among_the_bodies": tally.probes,
        "answers_to_bodies_compared": tally.compared,
        "streams": ends,
        "counters": {name: counters.get(name) for name in names},
        "held_after_bodies": held,
        "held_after_streams": held_after,
        "refused_with_speculation": tally.refused,
        "unanswered": tally.unanswered,
        "unlike_plain_sglang": tally.unlike,
        "wrong_answers": tally.wrong + wrong,
        "other_answers_afterwards": sum(
            a != b for a, b in zip(texts, again, strict=True)
        ),
        "tracebacks_of_ours": targets[0].tracebacks(),
        "server_errors": tally.errors,
    }


def main() -> int:
    """Run and print; status 1 when anything went wrong."""
    options = arguments()
    print(f"seed {options.seed}", file=sys.stderr)
    running = ("--max-running-requests", str(options.at_once))
    if options.url:
        targets = [Target("server", options.url)]
    else:
        targets = [start("plain SGLang", options.model, (*PLAIN, *running))]
        if not options.only_plain:
            targets.insert(0, start("VeriCache", options.model, (*OURS, *running)))
    try:
        seen = asyncio.run(fuzz(options, targets))
    finally:
        for target in targets:
            target.close()
    report = {
        **provenance(sys.argv[1:]),
        "seed": options.seed,
        "left_out": [rule.reason for rule in LEFT_OUT],
        **seen,
    }
    publish(report, options.out)
    names = ("held_after_bodies", "held_after_streams", "unlike_plain_sglang")
    names += ("wrong_answers", "other_answers_afterwards", "tracebacks_of_ours")
    return 1 if any(seen[name] for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())
