"""Every setting of the matrix against plain SGLang, token by token."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tqdm import tqdm  # type: ignore[import-untyped]

from vericache_sglang.evaluation.benchmark import DEMO, REPOSITORY, RESULTS, Benchmark
from vericache_sglang.evaluation.lossless import compare, run, tokens, waves
from vericache_sglang.evaluation.matrix import (
    COVERING,
    PLAIN,
    drafters,
    full,
    methods,
)
from vericache_sglang.evaluation.server import ServerError
from vericache_sglang.evaluation.workload import load_tokenizer
from vericache_sglang.observability.counters import AGREED_KEYS, PROPOSED_KEYS

if TYPE_CHECKING:
    import argparse

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.systems import System


def _measure(options: argparse.Namespace, results: Results) -> None:
    tokenizer = load_tokenizer(options.model)
    requests = waves(tokenizer, options.prompts, options.longest, options.seed)
    systems = list(COVERING) if options.covering else full()
    if options.compressors:
        systems = methods()
    if options.drafters:
        systems = drafters()
    if options.rows:
        systems = [system for system in systems if system.name in options.rows]
    plain = run(PLAIN, options.model, requests)
    for system in tqdm(systems, unit="setting"):
        results.row(system.name, _row, system, options, requests, plain)
    rows = results.rows.values()
    results.figures = {
        "tokens_compared": sum(row.get("tokens_compared", 0) for row in rows),
        "mismatches": sum(row.get("mismatches", 0) for row in rows),
        "failed_runs": sum("error" in row for row in rows),
    }
    for row in rows:
        differ = row.get("error") or row["examples"]
        results.require(not differ, f"{row['name']}: {differ}")


def _row(
    system: System,
    options: argparse.Namespace,
    requests: list[dict[str, Any]],
    plain: dict[str, Any],
) -> dict[str, Any]:
    """Run one setting; a run that fails is a row with an error, not the end."""
    flags = " ".join(system.flags).replace(f"{REPOSITORY}/", "")
    try:
        ours = run(system, options.model, requests)
    except ServerError as error:
        return {"flags": flags, "error": str(error)[-2000:]}
    mismatches = compare(plain, ours)
    return {
        "flags": flags,
        "tokens_compared": tokens(ours),
        "mismatches": len(mismatches),
        "examples": [asdict(mismatch) for mismatch in mismatches[:5]],
        "verifications": ours["state"]["cycles"],
        "compressions": ours["state"]["compressions"],
        "mean_accepted": ours["state"]["mean_accepted"],
        "mixed_share": ours["state"]["mixed_share"],
        "proposed": sum(ours["state"][key] for key in PROPOSED_KEYS.values()),
        "agreed": sum(ours["state"][key] for key in AGREED_KEYS.values()),
        "seconds": sum(ours["seconds"]),
    }


LOSSLESS = Benchmark(
    about="Tokens of every setting of the matrix against plain SGLang's. Fails where "
    "one differs or a server fails.",
    model=DEMO,
    seed=7,
    options={
        "prompts": (64, "in the largest wave"),
        "longest": (8000, "prompt tokens"),
        "covering": (False, "only what the test suite runs"),
        "compressors": (False, "every compressor: host, slow link and device"),
        "drafters": (False, "every inner drafter: host, device, retracted, alone"),
        "rows": ([str], "names of settings; all by default"),
    },
    measure=_measure,
    out=RESULTS / "lossless.json",
    selecting=("covering", "compressors", "drafters", "rows"),
)
