"""Malformed bodies and aborted streams: nothing breaks, leaks or answers differently.

Two servers are started, VeriCache's and plain SGLang, and get the same bodies.
``--url`` attacks a server that is running; its answers from before are the reference.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.attack import AttackTarget, attack, references, streams
from vericache_sglang.evaluation.benchmark import DEMO, Benchmark
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.fuzzing import draw, require_schemathesis
from vericache_sglang.evaluation.left_out import LEFT_OUT
from vericache_sglang.evaluation.server import Server
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

if TYPE_CHECKING:
    import argparse

    from vericache_sglang.evaluation.benchmark import Results

ENGINE = {
    "max_total_tokens": 3000,
    "context_length": 2048,
    "chunked_prefill_size": 1024,
    "schedule_conservativeness": 0.2,
    "tool_call_parser": "llama3",
    "reasoning_parser": "deepseek-v3",
}
"""A small pool and a short context, so that both are exceeded; more requests are
admitted than the pool holds, so that some are retracted or swapped out.

Custom logit processors are off: SGLang's scheduler ends at a string that is none.
"""

SETTINGS = {
    "min_prompt": 64,
    "draft_length": 8,
    "residency": "host",
    "staging_tokens": 1500,
}

NAMES = ("drafted", "accepted", "compressions", "offloads", "swap_outs", "swap_ins")

EMPTY = (
    *("held_after_bodies", "held_after_streams", "unlike_plain_sglang"),
    *("wrong_answers", "other_answers_afterwards", "tracebacks_of_vericache"),
)
"""Figures that must be empty."""


def probe_prompts(model: Any, seed: int) -> list[str]:
    """Draw the prompts of healthy requests, 100 to 400 tokens."""
    lengths = [100 + 20 * i for i in range(16)]
    return record_prompts(load_tokenizer(model), lengths, seed)


def _measure(options: argparse.Namespace, results: Results) -> None:
    require_schemathesis()
    engine = {**ENGINE, "max_running_requests": options.at_once}
    systems = [
        described("vericache", SETTINGS, engine),
        described("plain", None, engine),
    ]
    with ExitStack() as stack:
        servers: list[Server] = [Server(options.url)] if options.url else []
        for system in systems if not options.url else ():
            server = served(system, options.model, checked=True)
            servers.append(stack.enter_context(server))
        results.figures = asyncio.run(_fuzz(options, servers))
    for name in EMPTY:
        found = results.figures[name]
        results.require(not found, f"{name}: {found}")


async def _fuzz(options: argparse.Namespace, servers: list[Server]) -> dict[str, Any]:
    """Attack the first server and return the outcomes."""
    prompts = probe_prompts(options.model, options.seed)
    openapi = servers[0].ask("/openapi.json")
    bodies = draw(openapi, prompts, options.bodies, options.seed)
    probes = references(servers[-1], prompts)
    targets = [AttackTarget(server) for server in servers]
    ours, began = targets[0], time.monotonic()
    tally = await attack(targets, bodies, probes)
    held = await ours.settle()
    ends, wrong = await streams(ours, options.streams, probes, options.seed)
    held_after = await ours.settle()
    for target in targets:
        target.require_alive()
    again = references(ours.server, prompts)
    counters = ours.server.counters()
    return {
        "left_out": list(LEFT_OUT),
        "seconds": round(time.monotonic() - began, 1),
        "statuses": {str(key): tally.statuses[key] for key in sorted(tally.statuses)},
        "healthy_requests_among_the_bodies": tally.probes,
        "answers_to_bodies_compared": tally.compared,
        "streams": ends,
        "counters": {name: counters.get(name) for name in NAMES},
        "held_after_bodies": held,
        "held_after_streams": held_after,
        "refused_with_speculation": tally.refused,
        "unanswered": tally.unanswered,
        "unlike_plain_sglang": tally.unlike,
        "wrong_answers": tally.wrong + wrong,
        "other_answers_afterwards": [
            prompt for prompt in prompts if probes[prompt] != again[prompt]
        ],
        "tracebacks_of_vericache": ours.tracebacks(),
        "server_errors": tally.errors,
    }


FUZZ = Benchmark(
    about="Malformed bodies and aborted streams, beside plain SGLang. Fails where a "
    "server dies, leaks, answers differently or raises in VeriCache's code.",
    model=DEMO,
    seed=1,
    options={
        "url": (str, "attack this server, start none"),
        "bodies": (2000, "malformed or extreme"),
        "streams": (500, "of which two thirds are aborted"),
        "at-once": (24, "running requests"),
    },
    measure=_measure,
)
