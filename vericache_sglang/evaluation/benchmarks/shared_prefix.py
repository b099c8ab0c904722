"""One document, many questions: memory of the shared prefix, and time to first token.

Plain SGLang and VeriCache, with residual KV on the host, answer the same questions
alternately, several clients at once. Plain SGLang also has the document in its radix
cache.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from vericache_sglang.evaluation.benchmark import DEMO, Benchmark
from vericache_sglang.evaluation.client import closed_loop
from vericache_sglang.evaluation.figures import mismatches
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import bodies, greedy
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

if TYPE_CHECKING:
    import argparse

    from vericache_sglang.evaluation.benchmark import Results

HELD = (
    *("cache_draft_slots", "cache_residual_bytes", "cache_host_bytes"),
    *("cache_segments", "compressions", "shared_prefetches", "cycles", "mean_accepted"),
)


def _requests(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask about users of one document; only the question differs."""
    tokenizer = load_tokenizer(options.model)
    (text,) = record_prompts(tokenizer, [options.tokens], options.seed, calls=1)
    head, tail = text.rsplit("<|user|>", 1)
    users = re.findall(r"user (\d+)\|", head)
    rng = random.Random(options.seed)
    texts = [
        f"{head}<|user|>" + re.sub(r"\d+", rng.choice(users), tail, count=1)
        for _ in range(options.questions)
    ]
    params = [greedy(options.output, ignore_eos=True)] * len(texts)
    return bodies({"prompts": texts, "params": params})


def _measure(options: argparse.Namespace, results: Results) -> None:
    requests, clients = _requests(options), options.clients
    engine = {"max_total_tokens": 8 * options.tokens}
    settings = {
        "residency": "host",
        "compressor": options.compressor,
        "min_prompt": 256,
    }
    first: dict[str, list[float]] = {"plain": [], "vericache": []}
    seconds = dict.fromkeys(first, 0.0)
    differ = 0
    with (
        served(described("plain", None, engine), options.model) as plain,
        served(described("vericache", settings, engine), options.model) as ours,
    ):
        servers = [("plain", plain), ("vericache", ours)]
        for _, server in servers:
            closed_loop(server.url, requests[:1], 1, lambda: None, 3600)
        for turn, at in enumerate(range(0, len(requests), clients)):
            passes = {}
            for name, server in servers if turn % 2 else servers[::-1]:
                part = requests[at : at + clients]
                done = closed_loop(server.url, part, clients, lambda: None, 3600)
                errors = [answer.error for answer in done.answers if answer.error]
                results.require(not errors, f"{name}: {errors}")
                good = [answer for answer in done.answers if answer.times]
                first[name] += [answer.times[0][0] - answer.sent for answer in good]
                seconds[name] += done.seconds
                passes[name] = done
            differ += mismatches(passes["plain"], passes["vericache"])
        counters = ours.counters()
    results.require(differ == 0, f"{differ} answers differ from plain SGLang's")
    medians = {name: float(np.median(times)) for name, times in first.items()}
    results.figures = {
        "answers_that_differ": differ,
        "median_seconds_to_first_token": medians,
        "ratio_of_medians": medians["vericache"] / medians["plain"],
        "seconds_of_all": seconds,
        "held_after_all": {name: counters[name] for name in HELD},
    }


SHARED_PREFIX = Benchmark(
    about="Many questions about one document: what is held once, and the time to the "
    "first token. Fails where an answer differs.",
    model=DEMO,
    seed=5,
    options={
        "tokens": (7900, "of the document"),
        "questions": (32, "in all"),
        "clients": (8, "at once"),
        "output": (32, "tokens of an answer"),
        "compressor": ("keynorm", "as --vericache-compressor"),
    },
    measure=_measure,
)
