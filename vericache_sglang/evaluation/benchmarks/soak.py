"""A working set far above the host budget, for minutes: nothing fails, nothing grows.

Documents whose KV is many times the host budget are asked about at random, some far
more often than others. The pool holds two of them. Every answer is compared with plain
SGLang's, and the memory of the server's processes is read after every wave.
"""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING, Any

import psutil

from vericache_sglang.evaluation.benchmark import DEMO, Benchmark
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import answer, greedy
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.benchmark import Results

MIB = 1 << 20
WARM_SHARE = 0.2
"""Share of the time after which memory is compared: every tier is full by then."""


def _token_bytes(model: Path) -> int:
    """Return the bytes of one token's KV in float32."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    width = config["num_key_value_heads"] * config["head_dim"]
    return 2 * 4 * int(config["num_hidden_layers"] * width)


def _wave(texts: Sequence[str]) -> dict[str, Any]:
    return {"prompts": [*texts], "params": [greedy(8, ignore_eos=True)] * len(texts)}


def _resident_mib() -> float:
    """Return the memory of all processes below this one, in MiB."""
    below = psutil.Process().children(recursive=True)
    return sum(float(process.memory_info().rss) for process in below) / MIB


def _measure(options: argparse.Namespace, results: Results) -> None:
    working_set = options.working_set_mb * MIB
    count = int(working_set / _token_bytes(options.model) / options.tokens)
    lengths = [options.tokens] * count
    tokenizer = load_tokenizer(options.model)
    documents = record_prompts(tokenizer, lengths, options.seed, calls=1)
    engine = {"max_total_tokens": 8 * options.tokens, "disable_radix_cache": True}
    with served(described("plain", None, engine), options.model, checked=True) as plain:
        wanted = [answer(plain, _wave([text]))[0]["ids"] for text in documents]
    results.figures = {"documents": count, **_soak(options, documents, wanted)}
    for name in ("failed", "answers_that_differ"):
        results.require(not results.figures[name], f"{results.figures[name]} {name}")


def _soak(
    options: argparse.Namespace, documents: Sequence[str], wanted: Sequence[list[int]]
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
    rng = random.Random(options.seed)
    asked = differ = failed = 0
    memory: list[tuple[float, float]] = []
    system = described("vericache", settings, engine)
    with served(system, options.model, checked=True) as server:
        began = time.monotonic()
        while (passed := time.monotonic() - began) < 60 * options.minutes:
            # Squaring makes the first documents the ones asked about most.
            squares = [rng.random() ** 2 for _ in range(options.at_once)]
            picks = [int(len(documents) * square) for square in squares]
            answers = answer(server, _wave([documents[i] for i in picks]))
            asked += len(picks)
            for pick, got in zip(picks, answers, strict=True):
                failed += got["finish_reason"]["type"] != "length"
                differ += got["ids"] != wanted[pick]
            memory.append((passed, _resident_mib()))
        counters = server.counters()
    warm_at = WARM_SHARE * memory[-1][0]
    warm = [mib for at, mib in memory if at >= warm_at]
    held = {name: counters[name] for name in counters if name.startswith("cache_")}
    return {
        "requests": asked,
        "failed": failed,
        "answers_that_differ": differ,
        "resident_mib": {
            "first": memory[0][1],
            "warm": warm[0],
            "last": warm[-1],
            "least_when_warm": min(warm),
            "most_when_warm": max(warm),
        },
        "host_used_bytes": counters["host_used_bytes"],
        "host_budget_bytes": counters["host_budget_bytes"],
        **held,
    }


SOAK = Benchmark(
    about="Cached prefixes many times the host budget, for minutes. Fails where a "
    "request fails or differs from plain SGLang's.",
    model=DEMO,
    seed=1,
    options={
        "minutes": (10.0, "of asking"),
        "budget-mb": (64.0, "host memory, MiB"),
        "working-set-mb": (1024.0, "KV of all documents, MiB"),
        "tokens": (4096, "of a document"),
        "at-once": (4, "running requests"),
        "compressor": ("keynorm", "as --vericache-compressor"),
    },
    measure=_measure,
)
