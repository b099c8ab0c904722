"""Every compressor served: sizes, transfers, acceptance lengths, unverified answers.

For each compressor one server answers the same tool calls at several draft lengths,
and another answers them with the compressed KV alone.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from contextlib import chdir
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation import lossless
from vericache_sglang.evaluation.altered import LONGEST, LOSSY, TIMED
from vericache_sglang.evaluation.benchmark import DEMO, REPOSITORY, Benchmark
from vericache_sglang.evaluation.benchmarks.tool_calls import exact
from vericache_sglang.evaluation.compressor_lines import (
    DEFAULT,
    lines,
    packed_part_shape,
)
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import answer, compare, greedy
from vericache_sglang.evaluation.report import markdown_table
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.timers import read_sums
from vericache_sglang.evaluation.workload import (
    count_tokens,
    load_tokenizer,
    spread,
    tool_call_prompts,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vericache_sglang.demo_records import Prompt
    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.compressor_lines import Line
    from vericache_sglang.evaluation.server import Starter
    from vericache_sglang.evaluation.timers import Sums

LENGTHS = (8, 16, 32, 64)
"""Draft lengths that every prompt is asked with."""

TOKENS = 96
"""Most tokens of an answer; a call has about 50."""

HEADS = [
    *("compressor", "keep", "on device", "bits, bf16", "transfer", "transfer, bf16"),
    *("accepted of " + " / ".join(map(str, LENGTHS)), "share", "ms per 1K tokens"),
    *("exact alone", "exact with VeriCache", "wrong answers"),
]

LEGEND = """\
Measured:

- *on device*: slots of the compressed prompt over those of the whole one; the demo
  model is served with float32 KV;
- *transfer*: bytes brought back, over verifications times the prompt's KV bytes;
- *accepted*: drafts accepted per verification, without the full KV's own token, where
  a request asks for 8, 16, 32 and 64. Answers of 50 tokens end the last cycle: at most
  {most};
- *share*: accepted ones of all drafts at the four lengths;
- *ms per 1K tokens*: CPU time of compressing a prompt (observing, scoring, probing,
  packing, moving), per 1,000 tokens of it; `recency` shows what moving alone takes;
- *exact alone*: answers that are the wanted call where nothing is verified; *exact with
  VeriCache*: the worst of four lengths;
- *wrong answers*: requests, of {verified}, with another token or finish reason than
  plain SGLang's.

Calculated from measured counts:

- the most drafts accepted: every draft of the same answers right, by row;
- *bits, bf16*: per element of a bf16 KV that stay, scales and exact tokens included
  (16: all of it);
- *transfer, bf16*: of a bf16 KV, without escapes; the residual of a float32 number
  carries 16 low bits more.

Every cycle is as long as its request allows, where a server would choose shorter ones.
The question is in the prompt: methods that look at its last queries know what is asked.
"""


def draw(model: Path, context: int, each: int, seed: int) -> list[Prompt]:
    """Draw ``each`` prompts of up to half of ``context`` tokens, as many near it."""
    short = spread(each, context // 4, context // 2)
    long = spread(each, context * 7 // 8, context)
    return tool_call_prompts(load_tokenizer(model), [*short, *long], seed, calls=1)


def wave(prompts: Sequence[Prompt], length: int | None) -> dict[str, Any]:
    """Answer every prompt with a draft length; None: the server chooses."""
    asked = {} if length is None else {"vericache": {"draft_length": length}}
    params = greedy(TOKENS, **({"custom_params": asked} if asked else {}))
    return {
        "prompts": [prompt.text for prompt in prompts],
        "params": [params] * len(prompts),
    }


def engine_for(context: int, count: int) -> dict[str, Any]:
    """Return the engine fields of all servers: every prompt is computed each time."""
    slots = 2 * count * (context + TOKENS)
    return {"max_total_tokens": slots, "disable_radix_cache": True}


def serve_line(
    line: Line,
    options: argparse.Namespace,
    prompts: Sequence[Prompt],
    full: list[dict[str, Any]],
    start: Starter | None = None,
) -> dict[str, Any]:
    """Measure one compressor: at every draft length, then its compressed KV alone.

    Args:
        options: ``model`` and ``context``.
        full: Plain SGLang's answers.
        start: See ``served``.

    Returns:
        The row, of plain values.

    Raises:
        ServerError: A server failed.
    """
    engine = engine_for(options.context, len(prompts))
    settings = {
        "compressor": line.compressor,
        "keep": line.keep or 1.0,
        "draft_length": LENGTHS[-1],
        "max_verifies": len(prompts),
        "residency": "host",
        "min_prompt": 256,
        "staging_tokens": len(prompts) * (options.context + TOKENS),
    }
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder, "events")
        altered = f"{LONGEST},{TIMED}{events}"
        system = described(line.name, settings, engine, alteration=altered)
        with served(system, options.model, checked=True, start=start) as server:
            # One at a time, so that events are a request's.
            verified = [answer(server, {**wave(prompts, LENGTHS[0]), "at_once": 1})]
            sums = read_sums(events)
            verified += [answer(server, wave(prompts, n)) for n in LENGTHS[1:]]
    alone = described(line.name, settings, engine, alteration=LOSSY)
    answers = lossless.run(alone, options.model, [wave(prompts, None)], start)
    wrong = compare({"waves": [full] * len(LENGTHS)}, {"waves": verified})
    cycles = {
        str(length): count_cycles(answers, length)
        for length, answers in zip(LENGTHS, verified, strict=True)
    }
    return {
        "compressor": line.compressor,
        "label": line.label,
        "keep": line.keep,
        **sizes(line, options.model, sums, cycles),
        "lengths": cycles,
        "exact": [exact(some, prompts) for some in verified],
        "exact_alone": exact(answers["waves"][0], prompts),
        "wrong": [asdict(mismatch) for mismatch in wrong],
    }


def sizes(
    line: Line, model: Path, sums: Sequence[Sums], cycles: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """Return draft KV size, transferred share and time of compressing.

    Args:
        line: The row's compressor.
        model: Folder of the model, for the sizes of its KV.
        sums: Timings of each prompt, compressed once.
        cycles: See ``count_cycles``, by draft length.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    token_bytes = 2 * 4 * config["num_hidden_layers"] * heads * head_dim
    parts: Counter[str] = Counter()
    for each in sums:
        parts.update(each.split)
    packed = packed_part_shape(heads, head_dim)
    brought = sum(part["prompt_reads"] for part in cycles.values()) * token_bytes
    seconds = sum(each.compressing("cpu") for each in sums)
    return {
        "parts": dict(parts),
        "kept_share": parts["kept"] / parts["offered"],
        "device_share": parts["slots"] / parts["offered"],
        "device_bits_bfloat16": line.device_bits(parts, packed),
        "transfer": sum(part["staged_bytes"] for part in cycles.values()) / brought,
        "transfer_bfloat16": line.transfer_bfloat16(parts, packed),
        "compress_ms_per_1k": 1e6 * seconds / sum(each.prompt for each in sums),
    }


def count_cycles(answers: Sequence[dict[str, Any]], length: int) -> dict[str, int]:
    """Add up the draft-verify cycles of requests with one draft length.

    Returns:
        ``cycles``, ``drafted``, ``accepted``, ``staged_bytes``; ``fewest``: the cycles
        needed for as many tokens if every draft token is accepted; ``prompt_reads``:
        prompt tokens, once per verification.
    """
    figures = [answer["vericache"] for answer in answers]
    fields = ("cycles", "drafted", "accepted", "staged_bytes")
    found = {name: sum(each[name] for each in figures) for name in fields}
    # A cycle emits its accepted tokens and a bonus token.
    emitted = (each["accepted"] + each["cycles"] for each in figures)
    reads = (
        answer["prompt_tokens"] * answer["vericache"]["cycles"] for answer in answers
    )
    fewest = sum(-(-count // (length + 1)) for count in emitted)
    return {**found, "fewest": fewest, "prompt_reads": sum(reads)}


def _measure(options: argparse.Namespace, results: Results) -> None:
    model = options.model
    tokenizer = load_tokenizer(model)
    prompts = draw(model, options.context, options.each, options.seed)
    plain = described("full KV", None, engine_for(options.context, len(prompts)))
    full = lossless.run(plain, model, [wave(prompts, None)])["waves"][0]
    results.figures = {
        "requests": len(prompts),
        "prompt_tokens": [count_tokens(tokenizer, prompt.text) for prompt in prompts],
        "full_kv": {"exact": exact(full, prompts)},
    }
    with chdir(REPOSITORY):
        wanted = lines(options.lines, options.keeps)
        for line in wanted:
            results.row(line.name, serve_line, line, options, prompts, full)
    first = {line.name: results.rows[line.name] for line in wanted}
    results.rows = first | results.rows
    for row in results.rows.values():
        wrong = row["wrong"]
        results.require(not wrong, f"{row['name']}: {len(wrong)} wrong answers")


def page(report: dict[str, Any]) -> str:
    """Return the Markdown page of a report."""
    origin, counts, tokens = (
        report[key] for key in ("provenance", "requests", "prompt_tokens")
    )
    rows = report.get("rows", [])
    hardware, versions = origin["hardware"], origin["versions"]
    # Rows that --resume found in the file were measured by earlier commits.
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    head = (
        f"{counts} tool calls over documents of {tokens[0]:,} to {tokens[-1]:,} "
        f"tokens; {report['options']['model']}, residual KV on the host. Full KV: "
        f"{report['full_kv']['exact']} of {counts} exact. {hardware['cpu']}, SGLang "
        f"{versions['sglang']}, torch {versions['torch']}, commit {commits}, "
        f"{origin['date'][:10]}."
    )
    parts = ["# Compressors on the running server", f"    {origin['command']}", head]
    if rows:
        parts.append(markdown_table(HEADS, [_cells(row, counts) for row in rows]))
        verified = counts * len(LENGTHS)
        parts.append(LEGEND.format(verified=verified, most=_most(rows)))
    return "\n\n".join(parts)


def _cells(row: dict[str, Any], counts: int) -> list[str]:
    cycles = list(row["lengths"].values())
    drafted = sum(part["drafted"] for part in cycles)
    accepted = sum(part["accepted"] for part in cycles)
    return [
        f"`{row['label']}`",
        "" if row["keep"] is None else str(row["keep"]),
        f"{row['device_share']:.3f}",
        f"{row['device_bits_bfloat16']:.1f}",
        f"{row['transfer']:.3f}",
        f"{row['transfer_bfloat16']:.3f}",
        " / ".join(f"{part['accepted'] / part['cycles']:.1f}" for part in cycles),
        f"{accepted / drafted:.3f}",
        f"{row['compress_ms_per_1k']:.1f}",
        f"{row['exact_alone']} of {counts}",
        f"{min(row['exact'])} of {counts}",
        str(len(row["wrong"])),
    ]


def _most(rows: Sequence[dict[str, Any]]) -> str:
    """Return the range over rows of the largest possible acceptance length."""
    ranges = []
    for length in map(str, LENGTHS):
        sums = [row["lengths"][length] for row in rows]
        most = [(one["accepted"] + one["cycles"]) / one["fewest"] - 1 for one in sums]
        ranges.append(f"{min(most):.1f} to {max(most):.1f}")
    return " / ".join(ranges)


COMPRESSORS = Benchmark(
    about="Every compressor on the running server: sizes, transfers, accepted drafts. "
    "Fails where an answer is not plain SGLang's.",
    model=DEMO,
    options={
        "lines": (list(DEFAULT), "as --vericache-compressor"),
        "keeps": ([0.25, 0.125], "shares of tokens, of selectors"),
        "context": (4000, "tokens of the longest prompt"),
        "each": (3, "short prompts, and as many long ones"),
    },
    measure=_measure,
    page=page,
    selecting=("lines", "keeps"),
)
