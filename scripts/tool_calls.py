"""The paper's motive: tool calls on full KV, on the compressed KV alone, on VeriCache.

    python scripts/tool_calls.py --calls 32 --context 4000 --keep 0.125

The bundled demo model reads a document of user records and answers requests with JSON
calls whose right text is known. Each is asked freely and under a JSON schema. Prints a
table, and writes the figures with ``--out``. Exit status 1 if VeriCache's answers are
not those of the full KV.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from demo_model import records
from lossless import runs
from lossless.matrix import PLAIN
from lossless.prompts import count_tokens, load_tokenizer
from lossless.provenance import provenance, publish
from lossless.requests import greedy
from lossless.runs import ROOT, System

MODEL = ROOT / "configs" / "demo-model"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": sorted(records.FUNCTIONS)},
        "arguments": {"type": "object"},
    },
    "required": ["name", "arguments"],
}


def draw(calls: int, context: int, seed: int) -> list[records.Prompt]:
    """Draw one request per call, each over a document of its own.

    Args:
        calls: How many.
        context: Length of the prompts, in tokens.
        seed: Other seeds give other documents.
    """
    tokenizer = load_tokenizer(MODEL)
    rng = random.Random(seed)
    return [
        records.prompt_of_length(
            rng, context, lambda text: count_tokens(tokenizer, text), calls=1
        )
        for _ in range(calls)
    ]


def waves(prompts: list[records.Prompt], tokens: int) -> list[dict[str, Any]]:
    """Ask every prompt freely, then under the schema of a call."""
    texts = [prompt.text for prompt in prompts]
    schema = json.dumps(SCHEMA)
    return [
        {"prompts": texts, "params": [greedy(tokens)] * len(texts)},
        {"prompts": texts, "params": [greedy(tokens, json_schema=schema)] * len(texts)},
    ]


def systems(options: argparse.Namespace) -> list[System]:
    """Return full KV, the compressed KV alone, and VeriCache."""
    ours = System(
        name="VeriCache",
        settings={
            "compressor": options.compressor,
            "keep": options.keep,
            "draft_length": options.draft_length,
            "residency": "host",
            "min_prompt": 256,
        },
    )
    environment = runs.faulty("draft_part_alone")
    alone = replace(ours, name="compressed KV alone", environment=environment)
    return [replace(PLAIN, name="full KV"), alone, ours]


def count_exact(texts: list[str], prompts: list[records.Prompt]) -> int:
    """Count the texts that are the wanted calls."""
    pairs = zip(texts, prompts, strict=True)
    return sum(same_call(text, prompt.answer) for text, prompt in pairs)


def same_call(text: str, wanted: str) -> bool:
    """Say whether a text is the wanted call, whatever its white space."""
    try:
        return bool(json.loads(text) == json.loads(wanted))
    except json.JSONDecodeError:
        return False


def main() -> int:
    """Compare three systems on one set of calls; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=32, help="requests")
    parser.add_argument("--context", type=int, default=4000, help="prompt tokens")
    parser.add_argument(
        "--tokens", type=int, default=72, help="most tokens of an answer"
    )
    parser.add_argument("--keep", type=float, default=0.125, help="share kept")
    parser.add_argument("--draft-length", type=int, default=32, help="tokens")
    parser.add_argument("--compressor", default="keynorm", help="registry name")
    parser.add_argument("--seed", type=int, default=0, help="draws other documents")
    parser.add_argument("--out", help="file for the figures, JSON")
    options = parser.parse_args()
    prompts = draw(options.calls, options.context, options.seed)
    asked = waves(prompts, options.tokens)
    rows, texts = [], {}
    for system in systems(options):
        report = runs.run(system, MODEL, asked)
        texts[system.name] = [[a["text"] for a in wave] for wave in report["waves"]]
        exact = [
            sum(
                same_call(text, p.answer) for text, p in zip(wave, prompts, strict=True)
            )
            for wave in texts[system.name]
        ]
        state = report["state"]
        rows.append(
            {
                "system": system.name,
                "exact_free": exact[0],
                "exact_under_schema": exact[1],
                "drafted": state.get("drafted", 0),
                "accepted": state.get("accepted", 0),
            }
        )
        print(
            f"{system.name:22} {exact[0]:3} {exact[1]:3} of {options.calls}", flush=True
        )
    lossless = texts["VeriCache"] == texts["full KV"]
    report = {
        "provenance": provenance(sys.argv),
        "figure": "calls answered exactly, freely and under a JSON schema",
        "calls": options.calls,
        "same_text_as_full_kv": lossless,
        "systems": rows,
    }
    publish(report, options.out)
    return 0 if lossless else 1


if __name__ == "__main__":
    sys.exit(main())
