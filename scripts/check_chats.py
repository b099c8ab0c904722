"""Long chats, turn by turn: plain SGLang's tokens, and nearly its cached prefixes.

    python scripts/check_chats.py --out scripts/results/chats.json

Every turn sends the whole chat again. Plain SGLang keeps all of it in its radix cache;
ours keeps complements on the host and may prefill up to a segment more a turn.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from lossless.prompts import count_tokens, load_tokenizer, record_prompts
from lossless.provenance import provenance, publish
from lossless.requests import greedy
from lossless.runs import System
from lossless.serving import LiveSystem
from vericache_sglang.memory.segments import SEGMENT

ROOT = Path(__file__).parents[1]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model-long")
    parser.add_argument("--chats", type=int, default=2)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--longest", type=int, default=15800, help="tokens at the end")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--compressor", default="keynorm")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", help="also write the JSON to this file")
    return parser.parse_args()


def main() -> int:
    """Run and print; status 1 when an answer differs or too little was found again."""
    options = arguments()
    tokenizer = load_tokenizer(options.model)
    rng = random.Random(options.seed)
    each = options.longest // options.turns - options.output - 16
    parts = record_prompts(
        tokenizer,
        [each] * (options.chats * options.turns),
        options.seed,
        calls=1,
    )
    engine = {"max_total_tokens": 2 * options.chats * options.longest}
    settings = {
        "residency": "host",
        "compressor": options.compressor,
        "min_prompt": 256,
    }
    live = {
        "plain": LiveSystem(
            System(name="plain", settings=None, engine=engine), options.model
        ),
        "ours": LiveSystem(
            System(name="ours", settings=settings, engine=engine), options.model
        ),
    }
    texts = [""] * options.chats
    turns: list[dict[str, Any]] = []
    different = short = 0
    try:
        for turn in range(options.turns):
            order = list(range(options.chats))
            rng.shuffle(order)
            for chat in order:
                texts[chat] += parts[chat * options.turns + turn]
            wave = {
                "prompts": texts,
                "params": [greedy(options.output, ignore_eos=True)] * options.chats,
            }
            got = {name: each.answer(wave)[0] for name, each in live.items()}
            pairs = list(zip(got["plain"], got["ours"], strict=True))
            different += sum(a["ids"] != b["ids"] for a, b in pairs)
            short += sum(
                b["cached_tokens"] < a["cached_tokens"] - SEGMENT for a, b in pairs
            )
            turns.append(
                {
                    "tokens": [count_tokens(tokenizer, text) for text in texts],
                    "cached_plain": [a["cached_tokens"] for a, _ in pairs],
                    "cached_ours": [b["cached_tokens"] for _, b in pairs],
                }
            )
            for chat, (a, _) in enumerate(pairs):
                texts[chat] += a["text"] + "<|end|>\n"
        state = live["ours"].state()
    finally:
        for each_system in live.values():
            each_system.close()
    report = {
        **provenance(sys.argv[1:]),
        "model": options.model.name,
        "answers_that_differ": different,
        "turns_with_more_than_a_segment_less_cached": short,
        "turns": turns,
        "rounds": state["rounds"],
        "mean_accepted": state["mean_accepted"],
        "restored_from_host_tokens": state["cache_match_host_tokens"],
    }
    publish(report, options.out)
    return 1 if different or short else 0


if __name__ == "__main__":
    sys.exit(main())
