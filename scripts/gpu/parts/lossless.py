"""Tokens equal to plain SGLang's: two dtypes, with and without deterministic inference.

Without it plain SGLang itself answers differently at another batch size; how often it
does is what VeriCache's differences are to be read beside.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu.part import ROOT, Check, Step, Summary, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu.part import Context

MODEL = ROOT / "configs" / "demo-model"
PLAIN = "plain"
WORLDS = {
    "bf16, deterministic": {"dtype": "bfloat16", "deterministic": True},
    "bf16": {"dtype": "bfloat16", "deterministic": False},
    "fp32, deterministic": {"dtype": "float32", "deterministic": True},
    "fp32": {"dtype": "float32", "deterministic": False},
}
ROWS: dict[str, dict[str, Any]] = {
    "host": {"draft_length": 16, "keep": 0.25},
    "device": {"residency": "device", "draft_length": 8},
    "codes": {"compressor": "kivi:bits=4", "draft_length": 16},
}
"""Settings that are compared; ``scripts/check_lossless.py`` has the whole matrix."""

SIZES = {"cuda": (24, 4000, 64), "cpu": (5, 400, 12)}
"""Prompts, tokens of the longest, tokens of an answer."""


def steps(context: Context) -> list[Step]:
    """See ``gpu.part.PartModule``; plain comes first in each world."""
    worlds, rows = list(WORLDS), [PLAIN, *ROWS]
    if context.rehearsal:
        worlds, rows = ["fp32"], [PLAIN, "host"]
    return [
        Step(f"{world}: {row}", partial(answered, context, world, row), 60)
        for world in worlds
        for row in rows
    ]


def answered(context: Context, world: str, row: str) -> dict[str, Any]:
    """Answer the requests with one system of one world; compare with plain's answers.

    Raises:
        RunError: The engine failed.
        RuntimeError: There are no answers of plain to compare with.
    """
    from lossless.matrix import system
    from lossless.runs import System, compare, run, tokens

    engine = engine_of(context, WORLDS[world])
    own = (
        System(name=row, settings=None, engine=engine)
        if row == PLAIN
        else system(row, engine=engine, **ROWS[row])
    )
    report = run(own, MODEL, waves(context), timeout=context.minutes * 60)
    together, alone = report["waves"]
    file = context.out / "lossless" / f"{world}.json"
    found = {
        "requests": len(together),
        "tokens": tokens(report),
        "accepted": report["state"].get("mean_accepted"),
        "rounds": report["state"].get("rounds"),
    }
    if row == PLAIN:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report["waves"]), encoding="utf-8")
        own_flips = compare({"waves": [together]}, {"waves": [alone]})
        return found | {"flips": len(own_flips)}
    if not file.exists():
        raise RuntimeError(f"plain SGLang gave no answers in {world}")
    wanted = {"waves": json.loads(file.read_text(encoding="utf-8"))}
    differ = compare(wanted, report)
    return found | {
        "differ_together": sum(one.wave == 0 for one in differ),
        "differ_alone": sum(one.wave == 1 for one in differ),
        "first": str(differ[0]) if differ else "",
    }


def engine_of(context: Context, world: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments beyond ``lossless.runs.ENGINE``."""
    engine: dict[str, Any] = {"dtype": world["dtype"], "random_seed": 0}
    if world["deterministic"]:
        engine["enable_deterministic_inference"] = True
    if context.rehearsal:
        return {**engine, "max_total_tokens": 16384}
    return {
        **engine,
        "device": "cuda",
        "attention_backend": context.backend or None,
        "grammar_backend": "none",
        "disable_cuda_graph": False,
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_max_bs_decode": 16,
    }


def waves(context: Context) -> list[dict[str, Any]]:
    """Return the same prompts twice: all at once, then one by one, nothing cached."""
    from lossless.prompts import code_prompts, load_tokenizer, record_prompts, spread
    from lossless.requests import greedy

    count, longest, output = SIZES[context.device]
    tokenizer = load_tokenizer(MODEL)
    code = count // 3
    texts = record_prompts(tokenizer, spread(count - code, 200, longest), 7)
    texts += code_prompts(tokenizer, spread(code, 200, longest), 7)
    params = [greedy(output, ignore_eos=True) for _ in texts]
    wave = {"prompts": texts, "params": params, "flush": True}
    return [wave, {**wave, "at_once": 1}]


def conclude(context: Context, results: Mapping[str, Any]) -> Summary:
    """See ``gpu.part.PartModule``."""
    checks, rows, compared = [], [], 0
    for name, one in results.items():
        world, _, row = name.partition(": ")
        asked = one.get("requests", 0)
        flips = results.get(f"{world}: {PLAIN}", {}).get("flips")
        if row == PLAIN or "differ_together" not in one:
            cells = ("-", "-", _rate(one.get("flips"), asked))
        else:
            compared += one["tokens"]
            differ = one["differ_together"] + one["differ_alone"]
            cells = (
                _rate(one["differ_together"], asked),
                _rate(one["differ_alone"], asked),
                _rate(flips, asked),
            )
            if WORLDS[world]["deterministic"] or context.rehearsal:
                checks.append(Check(name, "0 differ", f"{differ}", differ == 0))
        rows.append((name, *cells, str(one.get("rounds")), one.get("error", "")[:80]))
    columns = ("setting", "differ, all at once", "differ, one by one")
    columns += ("plain's own flips", "rounds", "error")
    wrong = sum(not check.passed for check in checks)
    return Summary(
        headline=f"{compared} tokens compared, {wrong} of {len(checks)} settings that "
        "must be equal are not",
        checks=tuple(checks),
        tables=(Table("Requests that differ from plain SGLang", columns, tuple(rows)),),
    )


def _rate(count: int | None, whole: int) -> str:
    return f"{count} of {whole}" if count is not None else "-"
