"""Decoding speed over plain SGLang's, in alternating pairs: one point, or a sweep.

Both servers stay up with the same arguments, and the prompts are in both prefix caches
before the measurement, so that only decoding is timed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.benchmark import DEMO_LONG, Benchmark
from vericache_sglang.evaluation.figures import growth, per_verify
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import answer, differing, greedy
from vericache_sglang.evaluation.picture import draw_sweep, require_matplotlib
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.server import Server

    Point = tuple[int, int]
    """Prompt tokens, and requests at once."""


def points_of(options: argparse.Namespace) -> list[Point]:
    """Return the points of ``--points``.

    Raises:
        ConfigError: One is not two positive numbers.
    """
    points = []
    for given in options.points:
        parts = given.split("x")
        if len(parts) != 2 or not all(each.isdecimal() and int(each) for each in parts):
            raise ConfigError(f"--points {given}: must be TOKENSxREQUESTS, as 6000x4")
        points.append((int(parts[0]), int(parts[1])))
    return points


def engine_for(points: Sequence[Point], tokens: int) -> dict[str, Any]:
    """Return engine fields with which every request of every point fits twice.

    Args:
        points: To be served.
    """
    slots = max(2 * (n * (context + tokens + 200) + 4096) for context, n in points)
    return {
        "max_total_tokens": slots,
        "chunked_prefill_size": 2048,
        "context_length": max(context for context, _ in points) + tokens + 512,
        "max_running_requests": max(16, *(n for _, n in points)),
    }


def wave_of(options: argparse.Namespace, point: Point) -> dict[str, Any]:
    """Draw the requests of one point, the same for all systems."""
    context, requests = point
    tokenizer, calls = load_tokenizer(options.model), min(6, max(1, context // 100))
    lengths, seed = [context] * requests, options.seed + sum(point)
    return {
        "prompts": record_prompts(tokenizer, lengths, seed, calls),
        "params": [greedy(options.tokens, ignore_eos=True)] * requests,
    }


def alternate(
    plain: Server, ours: Server, wave: dict[str, Any], pairs: int
) -> dict[str, Any]:
    """Have two servers answer one wave by turns.

    Returns:
        Tokens per second of both (medians), the pairs' ratios and their median, the
        requests that differ, drafts per verification and counters of the last pass.
    """
    for server in (plain, ours):
        answer(server, wave)
    speeds: dict[Server, list[float]] = {plain: [], ours: []}
    mismatched, before = 0, {}
    for i in range(pairs):
        answers, before = {}, ours.counters()
        for server in (plain, ours) if i % 2 == 0 else (ours, plain):
            began = time.perf_counter()
            answers[server] = answer(server, wave)
            seconds = time.perf_counter() - began
            tokens = sum(len(each["ids"]) for each in answers[server])
            speeds[server].append(tokens / seconds)
        mismatched += differing(answers[plain], answers[ours])
    grown = growth(before, ours.counters())
    ratios = np.divide(speeds[ours], speeds[plain]).tolist()
    return {
        "plain_tokens_per_s": float(np.median(speeds[plain])),
        "vericache_tokens_per_s": float(np.median(speeds[ours])),
        "ratio": float(np.median(ratios)),
        "ratios": ratios,
        "mismatched_requests": mismatched,
        **per_verify(grown),
        "last_run_counters": grown,
    }


def _measure(
    options: argparse.Namespace,
    results: Results,
    points: Sequence[Point],
    variants: Sequence[dict[str, Any]],
) -> None:
    """Measure every point under every variant of VeriCache's settings."""
    engine = engine_for(points, options.tokens)
    engine["max_total_tokens"] = options.pool or engine["max_total_tokens"]
    waves = {point: wave_of(options, point) for point in points}
    with served(described("plain", None, engine), options.model) as plain:
        for settings in variants:
            system = described("vericache", {**settings, "host_gb": 8.0}, engine)
            with served(system, options.model) as ours:
                for (context, n), wave in waves.items():
                    named = ", ".join(f"{k} {v}" for k, v in settings.items())
                    name = f"{context}x{n}, {named}"
                    row = results.row(name, alternate, plain, ours, wave, options.pairs)
                    row |= {"context": context, "requests": n, **settings}
    differ = sum(row["mismatched_requests"] for row in results.rows.values())
    results.figures["mismatched_requests"] = differ
    results.require(differ == 0, f"{differ} requests differ from plain SGLang's")
    worst = min(row["ratio"] for row in results.rows.values())
    results.figures["worst_ratio"] = worst
    results.require(worst >= options.floor, f"worst ratio {worst:.3f}")


def _decode(options: argparse.Namespace, results: Results) -> None:
    names = ("compressor", "keep", "draft_length", "max_verifies")
    settings = {name: getattr(options, name) for name in names}
    _measure(options, results, [(options.context, options.requests)], [settings])


def _sweep(options: argparse.Namespace, results: Results) -> None:
    same = {"residency": options.residency, "min_prompt": options.min_prompt}
    variants = [
        {"keep": keep, "link_gbps": link, **same}
        for keep in options.keeps
        for link in options.links
    ]
    if options.plot:
        require_matplotlib()
    _measure(options, results, points_of(options), variants)
    if options.plot:
        draw_sweep(results.rows.values(), options.plot)


POINTS = "200x1 200x8 1000x16 2000x1 2000x4 6000x1 6000x8 16000x4"
PAIRS = {
    "pairs": (5, "timed pairs per point"),
    "pool": (int, "KV slots; by default all requests fit twice"),
    "floor": (0.0, "least ratio that does not fail"),
}
DECODE = Benchmark(
    about="Decoding speed of plain SGLang and VeriCache, by turns, prompts cached. "
    "Fails where an answer differs.",
    model=DEMO_LONG,
    seed=1,
    options={
        "context": (16000, "prompt tokens"),
        "requests": (8, "at once"),
        "tokens": (256, "output tokens each"),
        "keep": (0.125, "share of tokens"),
        "draft-length": (32, "tokens"),
        "max-verifies": (2, "requests verified in one iteration"),
        "compressor": ("snapkv", "as --vericache-compressor"),
        **PAIRS,
        "pairs": (3, "timed pairs"),
    },
    measure=_decode,
)
SWEEP = Benchmark(
    about="Never slower than plain SGLang: points of context x requests, under every "
    "kept share and link speed. Fails where an answer differs or a ratio is too low.",
    model=DEMO_LONG,
    seed=1,
    options={
        "points": (POINTS.split(), "prompt tokens x requests at once"),
        "keeps": ([0.25], "shares of tokens"),
        "links": ([0.0], "GB/s; 0: unlimited"),
        "residency": ("auto", "as --vericache-residency"),
        "min-prompt": (2048, "tokens"),
        "tokens": (200, "output tokens each"),
        "plot": (Path, "SVG of the ratios by context"),
        **PAIRS,
        "floor": (0.97, "least ratio that does not fail"),
    },
    measure=_sweep,
    selecting=("points", "keeps", "links", "plot"),
)
