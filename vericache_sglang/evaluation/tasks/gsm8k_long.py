"""GSM8K-Long: many grade-school problems in one prompt, answered one after another.

Defects of the official scoring: an answer that cannot be parsed vanishes, and the ones
after it are compared with the wrong questions' answers, because a ``zip`` pairs them by
order; commas are taken out of answers but not out of the wanted number, so ``1,000`` is
never met; an answer without a number counts as its place in the batch. ``exact`` here
has none of them: it counts a missing answer as wrong and pairs by the answer's number.
``exact, official`` is the script's own figure.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from vericache_sglang.demo_records import multi_request
from vericache_sglang.evaluation.tasks.calls import (
    draw,
    numbered_calls,
    record_messages,
)
from vericache_sglang.evaluation.tasks.sample import Files, Task, TaskSample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.tasks.sample import Parts, TwinSize

SOURCE = (
    "test.jsonl of github.com/openai/grade-school-math (MIT) and LongGenBench_prompt"
    ".txt, the 8 shots, of github.com/Dominic789654/LongGenBench (no licence file)"
)
FILES = Files(SOURCE)
BATCH, FIRST = 35, 9
"""Questions of a prompt in the official run script, and the number of the first."""

QUESTIONS = 700
"""Of the test set, in its order, that the official run script asks."""

SYSTEM = (
    "Answer each question step by step, adhering to the format shown in the examples "
    "provided. Start each response with 'Answer_' and introduce the final response "
    "with 'The answer is'. Do not repeat the question. Ensure that you respond to all "
    "the questions presented, regardless of their number."
)
NUMBER = re.compile(r"\d*\.?\d+")
ANSWER = re.compile(r"(?<=:\n)(.*?)(?=\n\n|$)", re.DOTALL)
NUMBERED = re.compile(r"Answer_(\d+):[ \t]*\n?(.*?)(?=Answer_\d+:|\Z)", re.DOTALL)


def load(folder: Path) -> list[TaskSample]:
    """Read ``test.jsonl`` and ``LongGenBench_prompt.txt``.

    Raises:
        ConfigError: One is missing, or a record is malformed.
    """
    shots = FILES.text(folder / "LongGenBench_prompt.txt")
    if "Question_1:" not in shots or "Answer_1:" not in shots:
        where = folder / "LongGenBench_prompt.txt"
        raise FILES.fail(where, "has no Question_1: or no Answer_1:")
    pairs = [question(*pair) for pair in FILES.lines(folder / "test.jsonl")]
    pairs = pairs[:QUESTIONS]
    batches = [pairs[i : i + BATCH] for i in range(0, len(pairs), BATCH)]
    return [batch(f"batch {i}", shots, each) for i, each in enumerate(batches)]


def question(where: str, record: Mapping[str, Any]) -> tuple[str, str]:
    """Return a record's question and its answer's text, which ends in ``#### n``."""
    answer = FILES.field(where, record, "answer", str)
    if "####" not in answer or not NUMBER.search(answer.rpartition("####")[2]):
        raise FILES.fail(where, "field answer: does not end in #### and a number")
    return FILES.field(where, record, "question", str), answer


def batch(name: str, shots: str, pairs: Sequence[tuple[str, str]]) -> TaskSample:
    """Return the sample of one batch, worded as in the official script."""
    asked = "".join(f"Question_{i}:\n{q}\n" for i, (q, _) in enumerate(pairs, FIRST))
    content = f"Examples: \n{shots}\n\nFollowing Question: \n{asked}\n"
    return TaskSample(
        name=name,
        messages=(
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": content},
        ),
        output_tokens=4096,
        wanted=tuple(answer for _, answer in pairs),
    )


def score(sample: TaskSample, answers: Sequence[str]) -> Parts:
    """Compare the last number of every answer as a string, commas left out."""
    text = sample.spoken(answers[0])
    wanted = [_last(answer) for answer in sample.wanted]
    listed = "\n".join(text.split("Answer_"))
    # The script writes the answer's place before it and reads both back.
    parsed = [_last(f"Q_{i}\n{each}") for i, each in enumerate(ANSWER.findall(listed))]
    golden = [NUMBER.findall(answer)[-1] for answer in sample.wanted]
    official = list(zip(parsed, golden, strict=False))
    by_number: dict[int, str | None] = {}
    for number, found in NUMBERED.findall(text):
        by_number.setdefault(int(number), _last(found))
    right = [by_number.get(i) == number for i, number in enumerate(wanted, FIRST)]
    return {
        "right": sum(right),
        "asked": len(wanted),
        "official right": sum(got == number for got, number in official),
        "official asked": len(official),
        "all right": float(all(right)),
        "one": 1,
    }


def _last(text: str) -> str | None:
    found = NUMBER.findall(text.replace(",", ""))
    return found[-1] if found else None


def twin(size: TwinSize) -> list[TaskSample]:
    """Draw batches that ask for users' codes; the document stands for the shots."""
    samples = []
    for number, prompt in enumerate(draw(size, size.calls)):
        while True:
            asked, answer = multi_request(size.rng, prompt.records, size.calls)
            calls = json.loads(answer)
            if all("code" in call["arguments"] for call in calls):
                break
        wanted = tuple(f"#### {call['arguments']['code']}" for call in calls)
        samples.append(
            TaskSample(
                name=f"synthetic-{number}",
                messages=record_messages(prompt.document, asked),
                output_tokens=80 * size.calls,
                wanted=wanted,
                spoken=_spoken,
            )
        )
    return samples


def _spoken(answer: str) -> str:
    calls = numbered_calls(answer)
    return "\n\n".join(
        f"Answer_{FIRST - 1 + n}:\nThe answer is {call['arguments'].get('code', '?')}."
        for n, call in calls.items()
    )


GSM8K_LONG = Task(
    source=SOURCE,
    load=load,
    twin=twin,
    listed=True,
    score=score,
    figures={
        "exact": ("right", "asked"),
        "exact, official": ("official right", "official asked"),
        "whole batches": ("all right", "one"),
    },
)
