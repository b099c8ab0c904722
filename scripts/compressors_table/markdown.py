"""The table of compressors as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compressors_table.lines import SIMULATED, SIMULATED_MOST
from compressors_table.measure import LENGTHS

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADS = (
    *("compressor", "keep", "on device", "bits, bf16", "transfer", "transfer, bf16"),
    *("accepted of " + " / ".join(map(str, LENGTHS)), "share", "ms per 1K tokens"),
    *("exact alone", "exact with VeriCache", "wrong tokens"),
)

LEGEND = """\
Measured in the server:

- *on device*: slots of the compressed prompt over those of the whole one; the demo
  model is served with float32 KV;
- *transfer*: bytes brought back, over verifications times the prompt's KV bytes;
- *accepted*: drafts accepted per verification where a request asks for 8, 16, 32 and
  64. Answers of 50 tokens end the last round: at most
  {most};
- *share*: accepted ones of all drafts at the four lengths;
- *ms per 1K tokens*: CPU time of compressing a prompt (watching, scoring, probing,
  packing, moving), per 1,000 tokens of it; `recency` shows what moving alone takes;
- *exact alone*: answers that are the wanted call where the compressed KV is served
  alone (drafts of 64, unverified); *exact with VeriCache*: the worst of four lengths;
- *wrong tokens*: requests, of {verified}, with another token or finish reason than
  plain SGLang's.

Calculated from measured counts:

- the most drafts accepted: every draft of the same answers right, by row;
- *bits, bf16*: per element of a bf16 KV that stay, scales and exact tokens included
  (16: all of it);
- *transfer, bf16*: of a bf16 KV, without escapes; the residual of a float32 number
  carries 16 low bits more.

Every round is as long as its request allows, where a server would choose shorter ones.
The question is in the prompt: methods that look at its last queries know what is asked.
"""

BESIDE = """\
Accepted of 16 / 32 / 64 drafts. *Served*: this run's prompts of {least:,} to {most:,}
tokens; *most*: calculated, every draft of the same answers right. *Simulated*:
teacher-forced, before there was a server, on other documents of about 4,000 tokens, at
most {ceiling}; its KIVI was KIVI-like, with groups of its own.
"""


def page(report: dict[str, Any]) -> str:
    """Return the page of a report of ``bench_compressors``."""
    full, origin = report["full_kv"], report["provenance"]
    rows = report["lines"]
    counts, tokens = report["requests"], report["prompt_tokens"]
    hardware, versions = origin["hardware"], origin["versions"]
    # Rows that a run found in its file were measured by earlier ones.
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    command = " ".join(["python scripts/bench_compressors.py", *origin["argv"]])
    return "\n".join(
        [
            "# Compressors on the running server",
            "",
            f"    {command}",
            "",
            f"{counts} tool calls over documents of {tokens[0]:,} to {tokens[-1]:,} "
            f"tokens; demo-model, complements on the host. Full KV: {full['exact']} of "
            f"{counts} exact. {hardware['cpu']}, {hardware['omp_threads']} thread, "
            f"SGLang {versions['sglang']}, torch {versions['torch']}, "
            f"commit {commits}, {origin['date'][:10]}.",
            "",
            *_table(HEADS, [_row(row, counts) for row in rows]),
            "",
            LEGEND.format(verified=counts * len(LENGTHS), most=_most(rows)),
            "## Beside the simulation",
            "",
            BESIDE.format(
                least=tokens[counts // 2],
                most=tokens[-1],
                ceiling=_slashed(SIMULATED_MOST),
            ),
            *_table(("draft part", "served", "most", "simulated"), _beside(rows)),
            "",
        ]
    )


def _row(row: dict[str, Any], counts: int) -> tuple[str, ...]:
    sums = [row["lengths"][str(length)]["all"] for length in LENGTHS]
    drafted = sum(part["drafted"] for part in sums)
    accepted = sum(part["accepted"] for part in sums)
    return (
        f"`{row['label']}`",
        "" if row["keep"] is None else str(row["keep"]),
        f"{row['device_share']:.3f}",
        f"{row['device_bits_bfloat16']:.1f}",
        f"{row['transfer']:.3f}",
        f"{row['transfer_bfloat16']:.3f}",
        _slashed([part["accepted"] / part["rounds"] for part in sums]),
        f"{accepted / drafted:.3f}",
        f"{row['compress_ms_per_1k']:.1f}",
        f"{row['exact_alone']} of {counts}",
        f"{min(row['exact'])} of {counts}",
        str(len(row["wrong"])),
    )


def _most(rows: Sequence[dict[str, Any]]) -> str:
    """Return the range of the rows' ceilings, by draft length."""
    ranges = []
    for length in LENGTHS:
        most = [_ceiling(row["lengths"][str(length)]["all"]) for row in rows]
        ranges.append(f"{min(most):.1f} to {max(most):.1f}")
    return " / ".join(ranges)


def _ceiling(sums: dict[str, int]) -> float:
    """Return accepted drafts per verification if every draft were right."""
    return (sums["accepted"] + sums["rounds"]) / sums["fewest"] - 1


def _beside(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for row in rows:
        if row["compressor"] not in SIMULATED:
            continue
        sums = [row["lengths"][str(length)]["long"] for length in LENGTHS[1:]]
        served = [part["accepted"] / part["rounds"] for part in sums]
        most = [_ceiling(part) for part in sums]
        simulated = _slashed(SIMULATED[row["compressor"]])
        found.append((f"`{row['label']}`", _slashed(served), _slashed(most), simulated))
    return found


def _slashed(figures: Sequence[float]) -> str:
    return " / ".join(f"{figure:.1f}" for figure in figures)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
