"""Long chats, turn by turn: plain SGLang's tokens, and nearly its cached prefixes.

Every turn sends the whole chat again. Plain SGLang keeps all of it in its radix cache;
VeriCache keeps residuals on the host and may prefill up to a segment more a turn.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.benchmark import DEMO_LONG, Benchmark
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import answer, differing, greedy
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import (
    count_tokens,
    load_tokenizer,
    record_prompts,
)
from vericache_sglang.kv.segment_length import SEGMENT

if TYPE_CHECKING:
    import argparse

    from vericache_sglang.evaluation.benchmark import Results


def _measure(options: argparse.Namespace, results: Results) -> None:
    tokenizer, rng = load_tokenizer(options.model), random.Random(options.seed)
    each = options.longest // options.turns - options.output - 16
    lengths = [each] * (options.chats * options.turns)
    parts = record_prompts(tokenizer, lengths, options.seed, calls=1)
    engine = {"max_total_tokens": 2 * options.chats * options.longest}
    settings = {
        "residency": "host",
        "compressor": options.compressor,
        "min_prompt": 256,
    }
    params = [greedy(options.output, ignore_eos=True)] * options.chats
    texts = [""] * options.chats
    turns: list[dict[str, Any]] = []
    differ = short = 0
    plain_system = described("plain", None, engine)
    our_system = described("vericache", settings, engine)
    with (
        served(plain_system, options.model, checked=True) as plain,
        served(our_system, options.model, checked=True) as ours,
    ):
        for turn in range(options.turns):
            order = list(range(options.chats))
            rng.shuffle(order)
            for chat in order:
                texts[chat] += parts[chat * options.turns + turn]
            wave = {"prompts": texts, "params": params}
            wanted, got = answer(plain, wave), answer(ours, wave)
            differ += differing(wanted, got)
            cached = [[one["cached_tokens"] for one in some] for some in (wanted, got)]
            short += sum(b < a - SEGMENT for a, b in zip(*cached, strict=True))
            turns.append(
                {
                    "tokens": [count_tokens(tokenizer, text) for text in texts],
                    "cached_plain": cached[0],
                    "cached_vericache": cached[1],
                }
            )
            for chat, one in enumerate(wanted):
                texts[chat] += one["text"] + "<|end|>\n"
        counters = ours.counters()
    results.require(differ == 0, f"{differ} answers differ from plain SGLang's")
    results.require(short == 0, f"{short} turns: more than a segment less was cached")
    results.figures = {
        "answers_that_differ": differ,
        "turns_with_more_than_a_segment_less_cached": short,
        "turns": turns,
        "verifications": counters["cycles"],
        "mean_accepted": counters["mean_accepted"],
        "restored_from_host_tokens": counters["cache_match_host_tokens"],
    }


CHATS = Benchmark(
    about="Growing chats: tokens found again turn by turn. Fails where an answer "
    "differs, or where a turn prefills over a segment more than plain SGLang.",
    model=DEMO_LONG,
    seed=3,
    options={
        "chats": (2, "at once"),
        "turns": (10, "of each"),
        "longest": (15800, "tokens at the end"),
        "output": (64, "tokens of an answer"),
        "compressor": ("keynorm", "as --vericache-compressor"),
    },
    measure=_measure,
)
