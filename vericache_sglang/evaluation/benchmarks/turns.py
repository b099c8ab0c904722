"""Systems that answer the same streamed requests one after the other: two benchmarks.

``pacing``: all residual KV is on the host, behind an emulated link. ``oversubscribed``:
the pool holds only part of the full KV of the running requests.
"""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.benchmark import DEMO_LONG, Benchmark
from vericache_sglang.evaluation.benchmarks.paired import engine_for, wave_of
from vericache_sglang.evaluation.client import closed_loop
from vericache_sglang.evaluation.figures import (
    growth,
    latencies,
    mismatches,
    per_verify,
)
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import bodies, greedy
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.client import Pass
    from vericache_sglang.evaluation.systems import System

    Figures = Callable[[Pass, dict[str, Any], dict[str, Any]], dict[str, Any]]
    """From a pass, what counters grew by meanwhile, and counters after it."""

COUNTED = (
    *("compressions", "offloads", "loads", "swap_outs", "swap_ins", "refused_moves"),
    *("peak_running", "peak_drafting", "peak_staged_bytes", "peak_host_bytes"),
    "host_budget_bytes",
)


def _serve(
    results: Results,
    systems: Sequence[System],
    requests: Sequence[dict[str, Any]],
    figures: Figures,
    repeats: int = 0,
) -> None:
    """Have each system answer all requests at once.

    Args:
        results: Get the figures of every system; a different answer is a failure.
        systems: The first one's answers are right.
        requests: Bodies of ``POST /generate``.
        figures: Of the pass that is reported.
        repeats: 0: one pass, under strict memory checks; else that many after one that
            fills the prefix cache, of which the median is reported.
    """
    found: dict[str, dict[str, Any]] = {}
    passes: dict[str, Pass] = {}
    for system in systems:
        with served(system, results.options.model, checked=not repeats) as server:
            runs = []
            for _ in range(1 + repeats):
                before = server.counters()
                done = closed_loop(
                    server.url, requests, len(requests), lambda: None, 3600
                )
                runs.append((done, growth(before, server.counters())))
            runs = sorted(runs[bool(repeats) :], key=lambda run: run[0].seconds)
            done, grown = runs[len(runs) // 2]
            found[system.name] = figures(done, grown, server.counters())
        passes[system.name] = done
        errors = sorted({answer.error for answer in done.answers if answer.error})
        results.require(not errors, f"{system.name}: {errors}")
        differ = mismatches(passes[systems[0].name], done)
        results.require(differ == 0, f"{system.name}: {differ} answers differ")
        print(system.name, json.dumps(found[system.name]), file=sys.stderr)
    results.figures["systems"] = found


def _pacing(options: argparse.Namespace, results: Results) -> None:
    point = options.context, options.requests
    engine = engine_for([point], options.tokens)
    systems = [described("plain", None, engine)]
    for pacing in ("staggered", "lockstep", "sequential"):
        together = options.requests if pacing == "lockstep" else 2
        settings = {
            "pacing": pacing,
            "residency": "host",
            "keep": options.keep,
            "draft_length": options.draft_length,
            "max_verifies": together,
            # Lock-step stages every residual at once; the buffer's size is its cost.
            "staging_tokens": together * options.context,
            "link_gbps": options.link_gbps,
            "host_gb": 8.0,
        }
        systems.append(described(pacing, settings, engine))

    def figures(
        done: Pass, grown: dict[str, Any], counters: dict[str, Any]
    ) -> dict[str, Any]:
        wait = latencies(done.answers)["itl_s"] or {}
        found = {
            "tokens_per_s": sum(len(a.ids) for a in done.answers) / done.seconds,
            **{f"inter_token_s_{key}": wait.get(key) for key in ("p50", "p99", "max")},
        }
        if not grown:
            return found
        rows = grown["draft_rows"] + grown["verify_rows"] + grown["waits"]
        link_s = grown["staged_bytes"] / (options.link_gbps * 1e9)
        return {
            **found,
            "link_utilisation": link_s / done.seconds,
            "rows_computing": 1 - grown["waits"] / max(1, rows),
            "staged_bytes": grown["staged_bytes"],
            "peak_staged_bytes": counters["peak_staged_bytes"],
            **per_verify(grown),
            "deadline_misses": grown.get("deadline_misses"),
        }

    requests = bodies(wave_of(options, point))
    _serve(results, systems, requests, figures, options.repeats)
    found = results.figures["systems"]
    base = found["plain"]["tokens_per_s"]
    results.figures |= {
        "note": "the host link is emulated: a copying thread paced to link_gbps",
        "ratio_to_plain": {
            name: row["tokens_per_s"] / base for name, row in found.items()
        },
    }


def _oversubscribed(options: argparse.Namespace, results: Results) -> None:
    rng, mean = random.Random(options.seed), options.context
    lengths = [rng.randint(mean // 2, mean * 3 // 2) for _ in range(options.requests)]
    outputs = [rng.randint(options.tokens // 2, options.tokens) for _ in lengths]
    tokenizer = load_tokenizer(options.model)
    wave = {
        "prompts": record_prompts(tokenizer, lengths, options.seed, calls=4),
        "params": [greedy(tokens, ignore_eos=True) for tokens in outputs],
    }
    full = options.at_once * (options.context + options.tokens)
    engine = {
        "chunked_prefill_size": 2048,
        "max_running_requests": options.at_once,
    }
    systems = [described("plain", None, {**engine, "max_total_tokens": 4 * full})]
    engine["max_total_tokens"] = int(full / options.times)
    for residency in options.residencies:
        settings = {
            "residency": residency,
            "min_prompt": 256,
            "host_gb": options.host_gb,
            "staging_tokens": 4 * options.context,
        }
        systems.append(described(residency, settings, engine))

    def figures(
        done: Pass, grown: dict[str, Any], counters: dict[str, Any]
    ) -> dict[str, Any]:
        ends = [answer.ended for answer in done.answers if not answer.error]
        silence = latencies(done.answers)["burst_s"] or {}
        return {
            "seconds": done.seconds,
            "finished": len(ends),
            "last_finished_s": max(ends, default=None),
            "longest_silence_s": silence.get("max"),
            **{name: counters.get(name) for name in COUNTED},
        }

    _serve(results, systems, bodies(wave), figures)


PACING = Benchmark(
    about="Staggered, lock-step and sequential verification over an emulated host "
    "link, beside plain SGLang. Fails where an answer differs.",
    model=DEMO_LONG,
    seed=1,
    options={
        "context": (8000, "prompt tokens"),
        "requests": (8, "at once"),
        "tokens": (240, "output tokens each"),
        "keep": (0.25, "share of tokens"),
        "draft-length": (32, "tokens"),
        "link-gbps": (0.5, "GB/s"),
        "repeats": (3, "passes, of which the median is reported"),
    },
    measure=_pacing,
)
OVERSUBSCRIBED = Benchmark(
    about="More requests than memory, in bounded memory. Fails where a request does "
    "not finish or differs from plain SGLang's with room for all.",
    model=DEMO_LONG,
    seed=1,
    options={
        "requests": (200, "in all"),
        "at-once": (16, "running requests"),
        "context": (2000, "mean prompt tokens"),
        "tokens": (200, "most output tokens"),
        "times": (4.0, "over-subscription"),
        "host-gb": (0.5, "GiB"),
        "residencies": (["host", "auto"], "as --vericache-residency"),
    },
    measure=_oversubscribed,
)
