"""Sampled output beside plain SGLang's, and beside the exact distribution.

Seeded and greedy requests of every sampling kind must give plain SGLang's tokens and
log-probabilities; what is drawn without a seed, over drafts that are made badly on
purpose, must pass a chi-square test, which drafts that are not verified must fail.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from tqdm import tqdm  # type: ignore[import-untyped]

from vericache_sglang.evaluation.altered import LOSSY
from vericache_sglang.evaluation.benchmark import DEMO, RESULTS, Benchmark
from vericache_sglang.evaluation.distribution import (
    PARAMS,
    exact_distribution,
    next_token,
    probability,
)
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import compare, run, tokens
from vericache_sglang.evaluation.sampled import (
    ENGINE,
    SETTINGS,
    logprob_entries,
    logprob_gap,
    reproducible,
    sampled_waves,
)
from vericache_sglang.evaluation.server import ServerError
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import code_prompts, load_tokenizer

if TYPE_CHECKING:
    import argparse

    import numpy as np
    from numpy.typing import NDArray

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.server import Server

SYSTEMS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("on the host", {"residency": "host"}, {}),
    ("on the device", {"residency": "device"}, {}),
    ("no overlap", {"residency": "host"}, {"disable_overlap_schedule": True}),
    (
        "page 16, draft 16, keep 0.125, random tokens kept",
        {
            "residency": "host",
            "draft_length": 16,
            "keep": 0.125,
            "compressor": "random",
        },
        {"page_size": 16},
    ),
    ("llguidance", {"residency": "device"}, {"grammar_backend": "llguidance"}),
)
"""Name, settings and engine fields beyond those of ``sampled``."""

BAD_DRAFTS = {
    "residency": "host",
    "draft_length": 3,
    "keep": 0.05,
    "compressor": "random",
    "min_prompt": 64,
    "recent_tokens": 0,
}
DRAWN_TOKENS = 8
"""Answers of half the length end before drafting them would pay."""

DRAWN_PROMPT = 300
AT_ONCE = 64

LEAST_P = 0.001
MOST_GAP = 1e-3
"""Plain SGLang, 3 requests at once and 8, differs by 2.8e-4 on such requests: one piece
of source code makes much of every rounding."""


def _measure(options: argparse.Namespace, results: Results) -> None:
    results.figures["distributions"] = rows = _distributions(options)
    for row in rows:
        verified = row["rule"] != "unverified"
        right = row["p"] > LEAST_P if verified else row["p"] < 1e-6
        results.require(right, f"{row['name']}, {row['rule']}: p = {row['p']:.2g}")
        drafted = not verified or row["accepted_share"] is not None
        results.require(drafted, f"{row['name']}, {row['rule']}: nothing was drafted")
    results.figures["identity"] = rows = _identity(options)
    for row in rows:
        differ = row.get("error") or row["examples"]
        results.require(not differ, f"{row['name']}: {differ}")
        gap = row.get("logprob_gap", 0.0)
        results.require(gap <= MOST_GAP, f"{row['name']}: log-probabilities by {gap}")


def _identity(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare every system with plain SGLang under the same engine fields."""
    size = options.each, options.longest, options.tokens
    every = sampled_waves(load_tokenizer(options.model), *size, options.seed)
    baselines: dict[str, dict[str, Any]] = {}
    rows = []
    for name, settings, more in tqdm(SYSTEMS, unit="system"):
        engine, key = {**ENGINE, **more}, json.dumps(more)
        waves = reproducible(every) if "disable_overlap_schedule" in more else every
        row: dict[str, Any] = {"name": name, "settings": settings, "engine": more}
        ours = described(name, {**SETTINGS, **settings}, engine)
        try:
            if key not in baselines:
                plain = described(f"plain, {name}", None, engine)
                baselines[key] = run(plain, options.model, waves)
            got = run(ours, options.model, waves)
            rows.append(row | _compared(waves, baselines[key], got))
        except ServerError as error:
            rows.append(row | {"error": str(error)[-2000:]})
    return rows


def _compared(
    waves: list[dict[str, Any]], plain: dict[str, Any], ours: dict[str, Any]
) -> dict[str, Any]:
    mismatches = compare(plain, ours)
    return {
        "requests": sum(len(wave["prompts"]) for wave in waves),
        "tokens_compared": tokens(ours),
        "mismatches": len(mismatches),
        "examples": [
            {"kind": waves[each.wave]["kind"], **asdict(each)}
            for each in mismatches[:5]
        ],
        "logprobs_compared": logprob_entries(plain),
        "logprob_gap": logprob_gap(plain, ours),
        **{key: ours["state"][key] for key in ("cycles", "drafted", "accepted")},
    }


def _distributions(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Test the distribution of both rules, and that unverified drafts are found."""
    tokenizer = load_tokenizer(options.model)
    (text,) = code_prompts(tokenizer, [DRAWN_PROMPT], options.seed)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    systems = {
        rule: described(rule, {**BAD_DRAFTS, "acceptance": rule})
        for rule in ("coupled", "rejection")
    }
    systems["unverified"] = described("unverified", BAD_DRAFTS, alteration=LOSSY)
    rows = []
    with served(described("plain"), options.model) as plain:
        logprobs = cache(next_token(plain, prompt, len(tokenizer)))
        for rule, system in systems.items():
            with served(system, options.model) as server:
                for name, params in tqdm(PARAMS.items(), desc=rule, unit="kind"):
                    before = server.counters()
                    answers = _draw(server, prompt, params, options.draws)
                    after = server.counters()
                    drafted, accepted = (
                        after[key] - before[key] for key in ("drafted", "accepted")
                    )

                    def exact(
                        prefix: tuple[int, ...], params: Any = params
                    ) -> NDArray[np.float64]:
                        return exact_distribution(logprobs(prefix), params)

                    rows.append(
                        {
                            "name": name,
                            "parameters": params,
                            "rule": rule,
                            "tokens": sum(map(len, answers)),
                            "accepted_share": accepted / drafted if drafted else None,
                            "p": probability(answers, exact),
                        }
                    )
    return rows


def _draw(
    server: Server, prompt: list[int], params: Any, count: int
) -> list[list[int]]:
    """Draw answers without seeds; an answer that ends early is as long as it is."""
    answers = []
    sampled = {**params, "max_new_tokens": DRAWN_TOKENS, "ignore_eos": True}
    for at in range(0, count, AT_ONCE):
        some = min(AT_ONCE, count - at)
        body = {"input_ids": [prompt] * some, "sampling_params": sampled}
        answers += [each["output_ids"] for each in server.generate(body)]
    return answers


SAMPLING = Benchmark(
    about="Sampled output against plain SGLang's and against the exact distribution. "
    "Fails where a token, a log-probability or a distribution differs.",
    model=DEMO,
    seed=3,
    options={
        "each": (16, "requests of each kind"),
        "longest": (1500, "prompt tokens"),
        "tokens": (40, "output tokens"),
        "draws": (4000, "answers of a chi-square test"),
    },
    measure=_measure,
    out=RESULTS / "sampling.json",
)
