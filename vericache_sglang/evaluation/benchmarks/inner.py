"""VeriCache with an inner drafter, without one, the drafter alone, and plain SGLang.

All systems answer the same waves of questions about the same documents, by turns. The
documents are in every prefix cache before, and no question is asked twice, so an inner
drafter that learns from finished answers never knows the one it is asked for.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vericache_sglang.config.schema import flag
from vericache_sglang.demo_records import multi_request, prompt_text
from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.altered import GUESSES
from vericache_sglang.evaluation.benchmark import (
    DEMO,
    DEMO_DRAFT,
    DEMO_HEAD,
    DEMO_LONG,
    Benchmark,
)
from vericache_sglang.evaluation.benchmarks.paired import engine_for, points_of
from vericache_sglang.evaluation.client import answered
from vericache_sglang.evaluation.figures import (
    decode_rate,
    growth,
    mismatches,
    per_token,
    per_verify,
)
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import answer, bodies, greedy
from vericache_sglang.evaluation.systems import (
    BUILT_IN,
    System,
    described,
    weighted,
)
from vericache_sglang.evaluation.workload import load_tokenizer, tool_call_prompts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.benchmarks.paired import Point
    from vericache_sglang.evaluation.server import Server

PLAIN, ALONE, OURS = "plain", "vericache", "with the drafter"
DRAFTER = "drafter alone"
"""The servers of a row, by their role; a drafter of random tokens is never alone."""

WITH_NGRAM, NGRAM = BUILT_IN["vericache-ngram"], BUILT_IN["ngram-alone"]
WITH_HEAD = "vericache+eagle3"


def _with_weights(inner: str, folder: Path) -> tuple[System, System]:
    over, alone = BUILT_IN[f"vericache-{inner}"], BUILT_IN[f"{inner}-alone"]
    weights = str(folder)
    return weighted(over, None, weights), weighted(alone, None, weights)


def _own_text(system: System) -> System:
    return replace(system, flags=(*system.flags, flag("inner_corpus"), "0"))


VARIANTS: Mapping[str, tuple[System, System | None]] = {
    "vericache+ngram": (WITH_NGRAM, NGRAM),
    "vericache+ngram-own": (_own_text(WITH_NGRAM), _own_text(NGRAM)),
    "vericache+model": _with_weights("model", DEMO_DRAFT),
    WITH_HEAD: _with_weights("eagle3", DEMO_HEAD),
    "vericache+random": (replace(WITH_NGRAM, alteration=GUESSES), None),
}
"""Servers with an inner drafter, over VeriCache and alone, with the flags in which they
differ from VeriCache alone; ``own`` searches each request's own text only."""


def waves_of(options: argparse.Namespace, point: Point) -> list[dict[str, Any]]:
    """Draw the waves, the same for all systems: further questions about documents."""
    context, requests = point
    calls, rng = min(6, max(1, context // 100)), random.Random(options.seed)
    tokenizer = load_tokenizer(options.model)
    documents = tool_call_prompts(tokenizer, [context] * requests, options.seed, calls)
    params = [greedy(options.tokens, ignore_eos=True)] * requests
    return [
        {
            "prompts": [
                prompt_text(each.document, multi_request(rng, each.records, calls)[0])
                for each in documents
            ],
            "params": params,
        }
        for _ in range(options.learned + options.rounds)
    ]


def take_turns(
    servers: Mapping[str, Server], waves: Sequence[dict[str, Any]], learned: int
) -> dict[str, Any]:
    """Have servers answer waves by turns, each time beginning with another one.

    Args:
        servers: By role.
        learned: Waves that those with a drafter answer before, untimed.

    Returns:
        Tokens per second by role (medians), of whole waves and while all requests
        decode (``decode_rate``), the ratios to the others in every wave and their
        medians, the requests that differ from plain SGLang's, and counters.
    """
    drafting = [role for role in servers if role != PLAIN]
    for role, server in servers.items():
        server.flush()
        for wave in waves[: learned if role in (DRAFTER, OURS) else 1]:
            answer(server, wave)
    before = {role: servers[role].counters() for role in drafting}
    speeds: dict[str, list[float]] = {role: [] for role in servers}
    decoding: dict[str, list[float]] = {role: [] for role in servers}
    mismatched = tokens = 0
    for i, wave in enumerate(waves[learned:]):
        roles, done = [*servers], {}
        order = roles[i % len(roles) :] + roles[: i % len(roles)]
        # Backward by turns: no server always follows the same one.
        for role in order[:: -1 if i % 2 else 1]:
            asked = bodies(wave)
            done[role] = answered(servers[role].url, asked, len(asked))
            emitted = sum(len(each.ids) for each in done[role].answers)
            speeds[role].append(emitted / done[role].seconds)
            decoding[role].append(decode_rate(done[role].answers) or np.nan)
        tokens += emitted
        for role in drafting:
            mismatched += mismatches(done[PLAIN], done[role])
    ratios = {
        f"{kind}_{role.replace(' ', '_')}": np.divide(rates[OURS], rates[role]).tolist()
        for kind, rates in (("over", speeds), ("decoding_over", decoding))
        for role in servers
        if role != OURS
    }
    grown = {
        role: growth(counted, servers[role].counters())
        for role, counted in before.items()
    }
    rows = {role: per_token(counted, tokens) for role, counted in grown.items()}
    return {
        "tokens_per_s": _medians(speeds),
        "decode_tokens_per_s": _medians(decoding),
        **{name: float(np.median(each)) for name, each in ratios.items()},
        "ratios": ratios,
        "iterations_per_token": rows,
        "fewer_iterations": rows[ALONE] / rows[OURS],
        "mismatched_requests": mismatched,
        **per_verify(grown[OURS]),
        "counters": grown,
    }


def _medians(rates: Mapping[str, list[float]]) -> dict[str, float]:
    return {role: float(np.median(each)) for role, each in rates.items()}


def _measure(options: argparse.Namespace, results: Results) -> None:
    unknown = sorted({*options.systems} - {*VARIANTS})
    if unknown:
        raise ConfigError(f"--systems {unknown[0]}; known: {', '.join(VARIANTS)}")
    points = points_of(options)
    waves = {point: waves_of(options, point) for point in points}
    engine = engine_for(points, options.tokens)
    # Every wave's questions and answers stay in the prefix cache beside the documents.
    engine["max_total_tokens"] += max(
        len(waves[point]) * point[1] * (options.tokens + 300) for point in points
    )
    names = ("compressor", "keep", "draft_length", "max_verifies")
    settings = {name: getattr(options, name) for name in names} | {"host_gb": 8.0}
    proposing = {**settings, "inner_length": options.inner_length}
    with ExitStack() as lasting:

        def serve(stack: ExitStack, system: System) -> Server:
            return stack.enter_context(served(system, options.model))

        common = {
            PLAIN: serve(lasting, described(PLAIN, None, engine)),
            ALONE: serve(lasting, described(ALONE, settings, engine)),
        }
        for name in options.systems:
            with ExitStack() as stack:
                servers = dict(common)
                for role, variant in zip((OURS, DRAFTER), VARIANTS[name], strict=True):
                    if variant is not None:
                        flags = described(role, proposing, engine).flags
                        system = replace(variant, flags=(*flags, *variant.flags))
                        servers[role] = serve(stack, system)
                for point in points:
                    row = f"{name}, {point[0]}x{point[1]}"
                    asked = waves[point]
                    results.row(row, take_turns, servers, asked, options.learned)
    _check(options, results)


def _check(options: argparse.Namespace, results: Results) -> None:
    """Require equal tokens, and no system below the better of its two parts."""
    rows = results.rows
    differ = sum(row["mismatched_requests"] for row in rows.values())
    results.figures["mismatched_requests"] = differ
    results.require(differ == 0, f"{differ} requests differ from plain SGLang's")
    for name, row in rows.items():
        alone = row.get("over_drafter_alone", row["over_vericache"])
        ratio = row["over_the_better_part"] = min(row["over_vericache"], alone)
        results.require(ratio >= options.floor, f"{name} is too slow: {ratio:.3f}")


INNER = Benchmark(
    about="What an inner drafter adds to VeriCache: with and without one, the drafter "
    "alone, plain SGLang, and a drafter that proposes random tokens, by turns on "
    "questions that no server has been asked before. Fails where an answer differs or "
    "a drafter makes VeriCache slower.",
    model=DEMO_LONG,
    seed=1,
    options={
        "systems": (
            ["vericache+ngram", "vericache+random"],
            f"of {', '.join(VARIANTS)}; {WITH_HEAD} needs the model {DEMO.name}",
        ),
        "points": (["15800x8"], "prompt tokens x requests at once"),
        "tokens": (256, "output tokens each"),
        "learned": (2, "waves answered before, of which ngram may know the answers"),
        "rounds": (5, "timed waves"),
        "keep": (0.125, "share of tokens"),
        "draft-length": (32, "tokens"),
        "inner-length": (8, "most tokens proposed per row"),
        "max-verifies": (2, "requests verified in one iteration"),
        "compressor": ("snapkv", "as --vericache-compressor"),
        "floor": (0.97, "least ratio that does not fail"),
    },
    measure=_measure,
    selecting=("systems", "points"),
)
