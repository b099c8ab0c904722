"""Soak test with a working set far above the host budget: no failures, no leaks.

The documents' KV is many times the host budget; requests choose documents at random,
some far more often than others. The pool holds two of them. Every answer is compared
with plain SGLang's, and the memory of the server's processes is sampled throughout.
With ``--mixed`` requests are of every kind, interleaved with malformed ones, aborts,
disconnects, flushes and weight updates, with a store and metrics on.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil

from vericache_sglang.evaluation.attack import HELD, AttackTarget
from vericache_sglang.evaluation.benchmark import DEMO, Benchmark
from vericache_sglang.evaluation.client import open_session
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.fuzzing import send
from vericache_sglang.evaluation.mixed_load import (
    KINDS,
    SAMPLED,
    Asked,
    Client,
    LoadOutcome,
    ask_all,
    drawn,
    healthy,
    odd_bodies,
)
from vericache_sglang.evaluation.prefix_store import link
from vericache_sglang.evaluation.server import ServerError
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.mixed_load import Answers
    from vericache_sglang.evaluation.server import Server

MIB = 1 << 20
WARM_SHARE = 0.2
"""Share of the run after which memory is compared: every tier is full by then."""

LOOK_SECONDS = 1.0
"""Interval of the memory samples, in seconds."""

CONTROLS_EVERY = 50
FLUSH_EVERY = 500
"""Requests between two control requests, and between two checkpoints that wait for all
answers, check for leaks and flush the cache."""

MOST_GROWTH = 1.05
"""Maximum ratio of the resident memory in the last quarter to the second quarter."""


def _token_bytes(model: Path) -> int:
    """Return the bytes of one token's KV in float32."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    width = config["num_key_value_heads"] * config["head_dim"]
    return 2 * 4 * int(config["num_hidden_layers"] * width)


def _resident_mib() -> float:
    """Return the memory of all processes below this one, in MiB."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += float(process.memory_info().rss)
    return total / MIB


def _measure(options: argparse.Namespace, results: Results) -> None:
    working_set = options.working_set_mb * MIB
    count = int(working_set / _token_bytes(options.model) / options.tokens)
    tokenizer = load_tokenizer(options.model)
    lengths = [options.tokens] * count
    documents = record_prompts(tokenizer, lengths, options.seed, calls=1)
    kinds = [*KINDS] if options.mixed else ["plain"]
    engine = {"max_total_tokens": 8 * options.tokens, "disable_radix_cache": True}
    with served(described("plain", None, engine), options.model, checked=True) as plain:
        wanted = asyncio.run(_references(plain, documents, kinds))
    requests = _mixed(options, documents) if options.mixed else _alike(documents)
    figures = _soak(options, requests, wanted)
    results.figures = {"documents": count, **figures}
    for name in ("wrong", "lost", "held", "tracebacks"):
        results.require(not figures[name], f"{name}: {figures[name]}")
    growth = figures["resident_mib"]["growth"]
    results.require(growth < MOST_GROWTH, f"memory grew by a factor of {growth}")


def _mixed(options: argparse.Namespace, documents: Sequence[str]) -> Iterator[Asked]:
    ids = load_tokenizer(options.model).encode(documents[0])
    odd = odd_bodies(documents, ids)
    return drawn(random.Random(options.seed), documents, odd, CONTROLS_EVERY)


def _alike(documents: Sequence[str]) -> Iterator[Asked]:
    rng = random.Random(1)
    while True:
        # Squaring makes the first documents the ones asked about most.
        at = int(len(documents) * rng.random() ** 2)
        yield Asked("plain", at, healthy("plain", documents[at]))


async def _references(
    plain: Server, documents: Sequence[str], kinds: Sequence[str]
) -> dict[tuple[str, int], Answers]:
    """Ask plain SGLang every healthy request that can come.

    Raises:
        ServerError: One has no answer.
    """
    found = {}
    async with open_session(300.0) as session:
        for kind in (each for each in kinds if each != SAMPLED):
            for i, document in enumerate(documents):
                reply = await send(session, plain.url, healthy(kind, document), 300.0)
                answers = reply.answers()
                if reply.status != 200 or not answers:
                    raise ServerError(f"plain SGLang, {kind}: {reply}"[:600])
                found[kind, i] = answers
    return found


def _soak(
    options: argparse.Namespace,
    requests: Iterator[Asked],
    wanted: dict[tuple[str, int], Answers],
) -> dict[str, Any]:
    """Send requests until the time or the requests run out; return the outcomes."""
    engine: dict[str, Any] = {
        "max_total_tokens": int(2.5 * options.tokens),
        "max_running_requests": options.at_once,
    }
    settings = {
        "residency": "host",
        "compressor": options.compressor,
        "min_prompt": min(256, options.tokens // 2),
        "host_gb": options.budget_mb / 1024,
    }
    with tempfile.TemporaryDirectory(prefix="vericache-soak-") as folder:
        if options.mixed:
            engine |= link(f"{folder}/store")
            engine |= {"enable_metrics": True, "enable_custom_logit_processor": True}
            settings["draft_length"] = 8
        system = described("vericache", settings, engine)
        with served(system, options.model, checked=True) as server:
            return asyncio.run(_asked(options, AttackTarget(server), requests, wanted))


async def _asked(
    options: argparse.Namespace,
    target: AttackTarget,
    requests: Iterator[Asked],
    wanted: dict[tuple[str, int], Answers],
) -> dict[str, Any]:
    seen = LoadOutcome()
    held: dict[str, int] = {}
    memory: list[tuple[float, float]] = []
    most = options.requests or 10**12
    began, asked = time.monotonic(), 0

    async def look() -> None:
        while True:
            memory.append((time.monotonic() - began, _resident_mib()))
            await asyncio.sleep(LOOK_SECONDS)

    async with open_session(300.0) as session:
        client = Client(target, session, wanted, seen, str(options.model))
        looking = asyncio.create_task(look())
        while asked < most and time.monotonic() - began < 60 * options.minutes:
            each = FLUSH_EVERY if options.mixed else 4 * options.at_once
            count = min(each, most - asked)
            await ask_all(client, requests, count, options.at_once)
            asked += count
            target.require_alive()
            if options.mixed:
                held |= await target.settle()
        seconds = time.monotonic() - began
        looking.cancel()
    counters = target.server.counters()
    held |= {name: counters[name] for name in HELD if counters[name]}
    return {
        "requests": asked,
        "seconds": round(seconds, 1),
        "kinds": dict(sorted(seen.asked.items())),
        "statuses_of_odd_requests": {str(k): n for k, n in seen.statuses.items()},
        "ends_of_streams": dict(seen.ends),
        "controls": dict(sorted(seen.controls.items())),
        "lost": seen.lost,
        "wrong": seen.wrong,
        "held": held,
        "tracebacks": target.tracebacks(),
        "resident_mib": _flatness(memory),
        "counters": {
            name: value
            for name, value in counters.items()
            if name.startswith(("cache_", "host_", "compressor_"))
            or name in ("drafted", "accepted", "cycles")
            or name in ("compressions", "swap_outs", "swap_ins")
        },
    }


def _flatness(memory: list[tuple[float, float]]) -> dict[str, float]:
    """Return the processes' memory over time, in MiB, and its growth."""
    end = memory[-1][0]
    warm = [mib for at, mib in memory if at >= WARM_SHARE * end]
    quarters = [
        [mib for at, mib in memory if low * end <= at <= (low + 0.25) * end]
        for low in (0.25, 0.75)
    ]
    second, last = (sorted(each)[len(each) // 2] for each in quarters)
    return {
        "first": memory[0][1],
        "warm": warm[0],
        "last": warm[-1],
        "least_when_warm": min(warm),
        "most_when_warm": max(warm),
        "median_of_second_quarter": second,
        "median_of_last_quarter": last,
        "growth": round(last / second, 4),
    }


SOAK = Benchmark(
    about="Cached prefixes many times the host budget, for long. Fails where a healthy "
    "request is lost or differs from plain SGLang's, something is held, memory grows.",
    model=DEMO,
    seed=1,
    options={
        "minutes": (10.0, "of asking"),
        "requests": (0, "at most in that time; 0: as many as fit"),
        "mixed": (False, "of every kind, one in five odd, with a store and metrics"),
        "budget-mb": (64.0, "host memory, MiB"),
        "working-set-mb": (1024.0, "KV of all documents, MiB"),
        "tokens": (4096, "of a document"),
        "at-once": (4, "running requests"),
        "compressor": ("keynorm", "as --vericache-compressor"),
    },
    measure=_measure,
)
