"""VeriCache with an inner drafter, without one, the drafter alone, and plain SGLang.

All systems answer the same waves of questions about the same documents, by turns. The
documents are in every prefix cache before, and no question is asked twice, so an inner
drafter that learns from finished answers never knows the one it is asked for.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vericache_sglang.config.schema import flag
from vericache_sglang.demo_records import multi_request, prompt_text
from vericache_sglang.evaluation.altered import GUESSES
from vericache_sglang.evaluation.benchmark import (
    DEMO,
    DEMO_DRAFT,
    DEMO_HEAD,
    DEMO_LONG,
    Benchmark,
)
from vericache_sglang.evaluation.benchmarks.paired import engine_for
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
    from vericache_sglang.evaluation.server import Server

PLAIN, ALONE, OURS = "plain", "vericache", "with the drafter"
"""The servers of a row, by their role."""


DRAFTER_ALONE = "ngram-alone"
WITH_HEAD = "vericache+eagle3"
WITH_NGRAM = BUILT_IN["vericache-ngram"]


def _weighted(inner: str, folder: Path) -> System:
    return weighted(BUILT_IN[f"vericache-{inner}"], None, str(folder))


VARIANTS: Mapping[str, System] = {
    "vericache+ngram": WITH_NGRAM,
    "vericache+ngram-own": replace(
        WITH_NGRAM, flags=(*WITH_NGRAM.flags, flag("inner_corpus"), "0")
    ),
    DRAFTER_ALONE: BUILT_IN[DRAFTER_ALONE],
    "vericache+model": _weighted("model", DEMO_DRAFT),
    WITH_HEAD: _weighted("eagle3", DEMO_HEAD),
    "vericache+random": replace(WITH_NGRAM, alteration=GUESSES),
}
"""Servers with an inner drafter by the name of the row, with the flags in which they
differ from VeriCache alone; ``own`` searches each request's own text only."""


def waves_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw the waves, the same for all systems: further questions about documents."""
    calls = min(6, max(1, options.context // 100))
    lengths, rng = [options.context] * options.requests, random.Random(options.seed)
    tokenizer = load_tokenizer(options.model)
    documents = tool_call_prompts(tokenizer, lengths, options.seed, calls)
    params = [greedy(options.tokens, ignore_eos=True)] * options.requests
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
        servers: By role; the last one first answers ``learned`` waves, untimed.

    Returns:
        Tokens per second by role (medians), of whole waves and while all requests
        decode (``decode_rate``), the ratios to the others in every wave and their
        medians, the requests that differ from plain SGLang's, and counters.
    """
    for wave in waves[:learned]:
        answer(servers[OURS], wave)
    before = {role: servers[role].counters() for role in (ALONE, OURS)}
    speeds: dict[str, list[float]] = {role: [] for role in servers}
    decoding: dict[str, list[float]] = {role: [] for role in servers}
    mismatched = tokens = 0
    for i, wave in enumerate(waves[learned:]):
        roles, done = [*servers], {}
        for role in roles[i % len(roles) :] + roles[: i % len(roles)]:
            asked = bodies(wave)
            done[role] = answered(servers[role].url, asked, len(asked))
            emitted = sum(len(each.ids) for each in done[role].answers)
            speeds[role].append(emitted / done[role].seconds)
            decoding[role].append(decode_rate(done[role].answers) or np.nan)
        tokens += emitted
        for role in (ALONE, OURS):
            mismatched += mismatches(done[PLAIN], done[role])
    ratios = {
        f"{kind}_{role}": np.divide(rates[OURS], rates[role]).tolist()
        for kind, rates in (("over", speeds), ("decoding_over", decoding))
        for role in (PLAIN, ALONE)
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
    engine = engine_for([(options.context, options.requests)], options.tokens)
    # Every wave's questions and answers stay in the prefix cache beside the documents.
    waves = waves_of(options)
    engine["max_total_tokens"] += len(waves) * options.requests * (options.tokens + 300)
    names = ("compressor", "keep", "draft_length", "max_verifies")
    settings = {name: getattr(options, name) for name in names} | {"host_gb": 8.0}
    inner_length = options.inner_length
    plain_system = described(PLAIN, None, engine)
    alone_system = described(ALONE, settings, engine)
    with (
        served(plain_system, options.model) as plain,
        served(alone_system, options.model) as alone,
    ):
        for server in (plain, alone):
            answer(server, waves[0])
        for name in options.systems:
            variant = VARIANTS[name]
            base = described(name, {**settings, "inner_length": inner_length}, engine)
            system = replace(variant, name=name, flags=(*base.flags, *variant.flags))
            with served(system, options.model) as ours:
                servers = {PLAIN: plain, ALONE: alone, OURS: ours}
                results.row(name, take_turns, servers, waves, options.learned)
    _check(options, results)


def _check(options: argparse.Namespace, results: Results) -> None:
    """Require equal tokens, and no system below the better of its two parts."""
    rows = results.rows
    differ = sum(row["mismatched_requests"] for row in rows.values())
    results.figures["mismatched_requests"] = differ
    results.require(differ == 0, f"{differ} requests differ from plain SGLang's")
    drafter = rows[DRAFTER_ALONE]["over_vericache"] if DRAFTER_ALONE in rows else 0.0
    for name, row in rows.items():
        if name == DRAFTER_ALONE:
            continue
        best = max(1.0, drafter) if name == "vericache+ngram" else 1.0
        ratio = row["over_vericache"] / best
        row["over_the_better_part"] = ratio
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
            ["vericache+ngram", DRAFTER_ALONE, "vericache+random"],
            f"rows: {', '.join(VARIANTS)}; {WITH_HEAD} needs the model {DEMO.name}",
        ),
        "context": (15800, "prompt tokens"),
        "requests": (8, "at once"),
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
    selecting=("systems",),
)
