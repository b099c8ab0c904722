"""Cost of compressing a prompt relative to its prefill, per compressor, in a server.

Plain SGLang and every compressor are served alternately; each answers a warm-up, then
every prompt once. Times are CPU seconds of the scheduler's thread, which are not
affected by other work on the machine; wall seconds are listed beside them.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.altered import TIMED
from vericache_sglang.evaluation.benchmark import DEMO, REPOSITORY, Benchmark
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import answer, greedy
from vericache_sglang.evaluation.report import markdown_table
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.timers import medians, read_sums
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

if TYPE_CHECKING:
    import argparse

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.timers import Sums

PLAIN = "plain SGLang"
LINES = (
    *("kvzip", "kvzip:plus=true"),
    "kvzap:weights=configs/demo-model/kvzap-linear",
    "kvzap:weights=configs/demo-model/kvzap-mlp",
    *("snapkv", "expected-attention", "kivi:bits=4"),
    "split-planes:exponent_bits=3,mantissa_bits=1",
    "turboquant:bits=4",
)
"""Lines of ``--vericache-compressor``; paths are relative to the repository."""

WARM_UP = 500
"""Tokens of the first prompt, which is not counted."""

COLUMNS = (
    ("prefill s", "prefill_cpu", 1.0),
    ("of plain", "prefill_of_plain", 1.0),
    ("observing %", "observer_share", 100.0),
    ("update %", "update_share", 100.0),
    ("probes s", "probe_cpu", 1.0),
    ("observe s", "observe_cpu", 1.0),
    ("split ms/1K", "split_per_1k", 1e3),
    ("scores ms/1K", "scores_per_1k", 1e3),
    ("packing ms/1K", "encode_per_1k", 1e3),
    ("all / prefill", "compress_ratio", 1.0),
    ("wall", "outside_ratio_wall", 1.0),
)
"""Heading, figure, factor."""

LEGEND = """Medians of {rounds} rounds on {model}; seconds of the scheduler's thread.
Prefill is without its observer; observing includes update. Probes include observe.
Split (ms per 1,000 prompt tokens) includes scores, packing and the copies to the host.
All / prefill: observing, probes and split over the prefill they belong to; wall: probes
and split alone, by the clock.

"""


def _serve(line: str, options: argparse.Namespace, prompts: list[str]) -> list[Sums]:
    """Answer the prompts one after the other; return the sums of all but the first."""
    most = max(options.context)
    settings = {
        "compressor": line,
        "keep": options.keep,
        "min_prompt": 64,
        "residency": "host",
        "draft_length": 8,
        "staging_tokens": 2 * most,
    }
    engine = {
        "chunked_prefill_size": 2048,
        "max_total_tokens": 4 * most + 8192,
        "disable_radix_cache": True,
    }
    params = [greedy(16, ignore_eos=True)] * len(prompts)
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder, "events")
        system = described(
            line,
            None if line == PLAIN else settings,
            engine,
            alteration=f"{TIMED}{events}",
        )
        with served(system, options.model, checked=True) as server:
            answer(server, {"prompts": prompts, "params": params, "at_once": 1})
        return read_sums(events)[1:]


def _measure(options: argparse.Namespace, results: Results) -> None:
    tokenizer = load_tokenizer(options.model)
    lengths = [WARM_UP, *options.context]
    prompts = record_prompts(tokenizer, lengths, options.seed, calls=1)
    runs: dict[str, list[list[Sums]]] = {line: [] for line in (PLAIN, *options.lines)}
    with chdir(REPOSITORY):
        for i in range(options.rounds):
            for line, found in runs.items():
                found.append(_serve(line, options, prompts))
                print(f"round {i + 1}: {line}", file=sys.stderr)
    base: dict[int, float] = {}
    for line, found in runs.items():
        for length, sums in zip(options.context, zip(*found, strict=True), strict=True):
            figures = medians(sums)
            base.setdefault(length, figures["prefill_cpu"])  # plain SGLang comes first
            figures["prefill_of_plain"] = figures["prefill_cpu"] / base[length]
            for part in ("split", "scores", "encode"):
                if f"{part}_cpu" in figures:
                    figures[f"{part}_per_1k"] = figures[f"{part}_cpu"] / length * 1000
            row: dict[str, Any] = {"line": line, "tokens": length, **figures}
            results.row(f"{line}, {length} tokens", row.copy)


def page(report: dict[str, Any]) -> str:
    """Return a Markdown table of every line and length."""
    options = report["options"]
    cells = [
        [
            row["line"],
            str(row["tokens"]),
            *(
                f"{row[figure] * factor:.3g}" if figure in row else ""
                for _, figure, factor in COLUMNS
            ),
        ]
        for row in report.get("rows", ())
    ]
    heads = ["line", "tokens", *(heading for heading, _, _ in COLUMNS)]
    legend = LEGEND.format(rounds=options["rounds"], model=options["model"])
    return legend + markdown_table(heads, cells) + "\n"


COMPRESS_COST = Benchmark(
    about="CPU seconds of compressing a prompt beside those of its prefill.",
    model=DEMO,
    seed=1,
    options={
        "context": ([2000, 8000], "prompt tokens"),
        "lines": (list(LINES), "as --vericache-compressor"),
        "keep": (0.25, "share of tokens"),
        "rounds": (3, "servers of each line"),
    },
    measure=_measure,
    page=page,
)
