"""The paper's motive: tool calls on full KV, on the compressed KV alone, on VeriCache.

The demo model reads a document of user records and answers requests with JSON calls of
known text. Each request is sent without and with a JSON schema.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from vericache_sglang.demo_records import FUNCTIONS
from vericache_sglang.evaluation import lossless
from vericache_sglang.evaluation.altered import LOSSY
from vericache_sglang.evaluation.benchmark import DEMO, Benchmark
from vericache_sglang.evaluation.lossless import greedy
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer, tool_call_prompts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vericache_sglang.demo_records import Prompt
    from vericache_sglang.evaluation.benchmark import Results

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": sorted(FUNCTIONS)},
        "arguments": {"type": "object"},
    },
    "required": ["name", "arguments"],
}


def exact(answers: Sequence[dict[str, Any]], prompts: Sequence[Prompt]) -> int:
    """Count the answers that are the wanted calls, whatever their white space."""
    pairs = zip(answers, prompts, strict=True)
    return sum(_same_call(answer["text"], prompt.answer) for answer, prompt in pairs)


def _same_call(text: str, wanted: str) -> bool:
    try:
        return bool(json.loads(text) == json.loads(wanted))
    except json.JSONDecodeError:
        return False


def _measure(options: argparse.Namespace, results: Results) -> None:
    lengths = [options.context] * options.calls
    tokenizer = load_tokenizer(options.model)
    prompts = tool_call_prompts(tokenizer, lengths, options.seed, calls=1)
    texts, schema = [prompt.text for prompt in prompts], json.dumps(SCHEMA)
    waves = [
        {"prompts": texts, "params": [greedy(options.tokens, **more)] * len(texts)}
        for more in ({}, {"json_schema": schema})
    ]
    settings = {
        "compressor": options.compressor,
        "keep": options.keep,
        "draft_length": options.draft_length,
        "residency": "host",
        "min_prompt": 256,
    }
    answers, systems = {}, []
    for system in (
        described("full KV"),
        described("compressed KV alone", settings, alteration=LOSSY),
        described("VeriCache", settings),
    ):
        report = lossless.run(system, options.model, waves)
        answers[system.name] = report
        free, under_schema = (exact(wave, prompts) for wave in report["waves"])
        print(
            f"{system.name:22} {free:3} {under_schema:3} of {options.calls}",
            file=sys.stderr,
        )
        systems.append(
            {
                "system": system.name,
                "exact_free": free,
                "exact_under_schema": under_schema,
                "drafted": report["state"].get("drafted", 0),
                "accepted": report["state"].get("accepted", 0),
            }
        )
    mismatches = lossless.compare(answers["full KV"], answers["VeriCache"])
    results.require(not mismatches, f"{len(mismatches)} answers are not the full KV's")
    results.figures = {
        "figure": "calls answered exactly, freely and under a JSON schema",
        "same_tokens_as_full_kv": not mismatches,
        "systems": systems,
    }


TOOL_CALLS = Benchmark(
    about="Tool calls answered exactly: full KV, compressed KV alone, VeriCache. Fails "
    "where VeriCache's answers are not those of the full KV.",
    model=DEMO,
    seed=0,
    options={
        "calls": (32, "requests"),
        "context": (4000, "prompt tokens"),
        "tokens": (72, "most tokens of an answer"),
        "keep": (0.125, "share of tokens"),
        "draft-length": (32, "tokens"),
        "compressor": ("keynorm", "as --vericache-compressor"),
    },
    measure=_measure,
)
