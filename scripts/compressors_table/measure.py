"""Serving one line of the table, and summing up what its requests came to."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressors_table.lines import extent
from demo_model import records
from lossless.prompts import count_tokens, load_tokenizer, spread
from lossless.requests import greedy
from lossless.runs import ROOT, System, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compressors_table.lines import Line

MODEL = ROOT / "configs" / "demo-model"
PLUGIN = Path(__file__).parent / "plugin"

LENGTHS = (8, 16, 32, 64)
"""Draft lengths that every prompt is asked with; alone, it is asked with the last."""

TOKENS = 96
"""Most tokens of an answer; a call has about 50."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompts of every line.

    Attributes:
        prompts: Tool calls, each over a document of its own; the short ones first.
        short: How many of them are short.
    """

    prompts: list[records.Prompt]
    short: int

    def wave(self, length: int | None, *, alone: bool = False) -> dict[str, Any]:
        """Return all prompts at once, in the form ``lossless.answer`` takes.

        Args:
            length: Drafts between two verifications; None: a plain request.
            alone: Emit drafts unverified.
        """
        return {
            "prompts": [prompt.text for prompt in self.prompts],
            "params": [
                greedy(TOKENS)
                if length is None
                else greedy(
                    TOKENS,
                    custom_params={
                        "vericache": {"draft_length": length},
                        "table": {"request": i, "length": length, "alone": alone},
                    },
                )
                for i in range(len(self.prompts))
            ],
        }

    def exact(self, answers: Sequence[dict[str, Any]]) -> int:
        """Count the answers that are the wanted calls."""
        pairs = zip(answers, self.prompts, strict=True)
        return sum(answer["text"] == prompt.answer for answer, prompt in pairs)


def ask(context: int, each: int, seed: int) -> Asked:
    """Draw ``each`` prompts of up to half of ``context`` tokens and ``each`` near it.

    Args:
        context: Tokens of the longest prompt.
        each: Short and long prompts, >= 2.
        seed: Other seeds give other documents.
    """
    tokenizer, rng = load_tokenizer(MODEL), random.Random(seed)
    short = spread(each, context // 4, context // 2)
    long = spread(each, context * 7 // 8, context)
    prompts = [
        records.prompt_of_length(
            rng, tokens, lambda text: count_tokens(tokenizer, text)
        )
        for tokens in (*short, *long)
    ]
    return Asked(prompts, each)


def engine(asked: Asked, context: int, *, cache: bool = True) -> dict[str, Any]:
    """Return the engine's arguments, the same for plain SGLang and for every line.

    Args:
        asked: The prompts.
        context: Tokens of the longest one.
        cache: Keep the prompts' KV from wave to wave, as a server does.
    """
    room = 2 * len(asked.prompts) * (context + TOKENS)
    return {"max_total_tokens": room, "disable_radix_cache": not cache}


def serve_full(
    run: Callable[..., dict[str, Any]], asked: Asked, context: int
) -> dict[str, Any]:
    """Answer with plain SGLang.

    Returns:
        ``answers`` (as ``lossless.answer`` gives them) and ``exact`` (how many are the
        wanted calls).
    """
    system = System(name="full KV", settings=None, engine=engine(asked, context))
    answers = run(system, MODEL, [asked.wave(None)])["waves"][0]
    return {"answers": answers, "exact": asked.exact(answers)}


def serve_line(
    run: Callable[..., dict[str, Any]],
    line: Line,
    asked: Asked,
    context: int,
    full: dict[str, Any],
) -> dict[str, Any]:
    """Answer with one line: at every draft length, then its compressed KV alone.

    Args:
        run: ``WarmEngines.run``, or a function like it.
        line: What to serve.
        asked: The prompts.
        context: Tokens of the longest one.
        full: What ``serve_full`` returned for the same prompts.

    Returns:
        The row, of plain values.

    Raises:
        RunError: The engine failed.
    """
    settings = {
        "compressor": line.compressor,
        "keep": line.keep or 1.0,
        "draft_length": LENGTHS[-1],
        "max_verifies": len(asked.prompts),
        "residency": "host",
        "min_prompt": 256,
        "staging_tokens": len(asked.prompts) * (context + TOKENS),
    }
    system = System(
        name=line.name,
        settings=settings,
        # What watches a prompt's queries must see all of them in every wave.
        engine=engine(asked, context, cache=not line.streams),
        environment={"PYTHONPATH": str(PLUGIN)},
    )
    waves = [asked.wave(length) for length in LENGTHS]
    report = run(system, MODEL, [*waves, asked.wave(LENGTHS[-1], alone=True)])
    *verified, alone = report["waves"]
    wrong = compare({"waves": [full["answers"]] * len(LENGTHS)}, {"waves": verified})
    notes = report["state"]["table"]
    return {
        "name": line.name,
        "compressor": line.compressor,
        "label": line.label,
        "keep": line.keep,
        "seconds": report["seconds"],
        **sizes(line, notes),
        **rounds(notes, asked.short),
        "exact": [asked.exact(answers) for answers in verified],
        "exact_alone": asked.exact(alone),
        "wrong": [asdict(mismatch) for mismatch in wrong],
    }


def sizes(line: Line, notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what stays, what moves and what compressing takes.

    Args:
        line: The row's compressor.
        notes: Of its requests, as the plugin writes them; all were split.
    """
    parts: Counter[str] = Counter()
    for note in notes:
        parts.update(note["parts"])
    model = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    packed = extent(model["num_key_value_heads"], model["head_dim"])
    brought = sum(note["rounds"] * note["kv_bytes"] for note in notes)
    first = [note for note in notes if note["length"] == LENGTHS[0]]  # nothing cached
    seconds = sum(note["compress_seconds"] for note in first)
    return {
        "parts": dict(parts),
        "kept_share": parts["kept"] / parts["offered"],
        "device_share": parts["slots"] / parts["offered"],
        "device_bits_bfloat16": line.device_bits(parts, packed),
        "transfer": sum(note["staged_bytes"] for note in notes) / brought,
        "transfer_bfloat16": line.transfer_bfloat16(parts, packed),
        "compress_ms_per_1k": 1e6 * seconds / sum(note["prompt"] for note in first),
    }


def rounds(notes: Sequence[dict[str, Any]], short: int) -> dict[str, Any]:
    """Sum up verified requests by draft length, all of them and the long ones.

    Args:
        notes: As the plugin writes them.
        short: Requests before this index are short.
    """
    found: dict[str, Any] = {}
    for length in LENGTHS:
        of = [n for n in notes if n["length"] == length and not n["alone"]]
        long = [note for note in of if note["request"] >= short]
        found[str(length)] = {"all": sums(of, length), "long": sums(long, length)}
    return {"lengths": found}


def sums(notes: Sequence[dict[str, Any]], length: int) -> dict[str, int]:
    """Add up the rounds of requests with one draft length.

    Returns:
        ``rounds``, ``drafted``, ``accepted``, ``staged_bytes``, and ``fewest``: the
        rounds in which as many tokens come if every draft is right.
    """
    fields = ("rounds", "drafted", "accepted", "staged_bytes")
    found = {name: sum(note[name] for note in notes) for name in fields}
    # A round emits what it accepts and one token of the full KV's.
    emitted = (note["accepted"] + note["rounds"] for note in notes)
    return {**found, "fewest": sum(-(-count // (length + 1)) for count in emitted)}
