"""LongGenBench (Wu et al.): plans of many blocks, each with its number.

The completion rate needs no judge. STIC does (whether a block includes an event): it is
counted where a sample has one, over all events (officially the mean of three kinds).
The synthetic twin's is exact, a text to be contained.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.tasks.calls import (
    draw,
    numbered_calls,
    record_messages,
)
from vericache_sglang.evaluation.tasks.sample import Files, Task, TaskSample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.tasks.sample import Parts, TwinSize

SOURCE = (
    "Dataset_short.json or Dataset_long.json of github.com/mozhu621/LongGenBench "
    "(no licence file)"
)
FILES = Files(SOURCE)
CHECKS = ("checks_once", "checks_range", "checks_periodic")
SAMPLING = {
    "temperature": 0.95,
    "top_p": 0.95,
    "sampling_seed": 6211027,
    "stop": ["*** finished"],
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a sample's blocks are compared with.

    Attributes:
        prefix: Beginning of the first block, which the prompt has already.
        kind: Word before a block's number.
        number: Blocks wanted.
        checks: (block, event) of every check.
        judge: From a block and an event to whether it is included; None: no judge.
    """

    prefix: str
    kind: str
    number: int
    checks: tuple[tuple[int, str], ...] = ()
    judge: Callable[[str, str], bool] | None = None


def load(folder: Path) -> list[TaskSample]:
    """Read the data set's file; the short one where both are there.

    Raises:
        ConfigError: There is neither, or a record is malformed.
    """
    names = ("Dataset_short.json", "Dataset_long.json")
    file = next((folder / n for n in names if (folder / n).exists()), folder / names[0])
    return [_sample(f"{file.stem}/{i}", *p) for i, p in enumerate(FILES.array(file))]


def _sample(name: str, where: str, record: Mapping[str, Any]) -> TaskSample:
    number = FILES.field(where, record, "number", int)
    if number < 1:
        raise FILES.fail(where, f"field number: wanted >= 1, got {number}")
    checks = []
    for each in CHECKS:
        for block, event in FILES.field(where, record, each, dict).items():
            if not block.isdigit() or not isinstance(event, str):
                raise FILES.fail(where, f"field {each}: wanted block number -> text")
            checks.append((int(block), event))
    kind = FILES.field(where, record, "type", str)
    return TaskSample(
        name=name,
        text=FILES.field(where, record, "prompt", str),
        output_tokens=16000,
        sampling=SAMPLING,
        wanted=Blocks(
            FILES.field(where, record, "prefix", str), kind, number, tuple(checks)
        ),
    )


def blocks_in(text: str, kind: str) -> dict[int, str]:
    """Return number -> the first block with it, of a text split at ``#*#``."""
    found: dict[int, str] = {}
    for block in text.split("#*#"):
        match = re.search(rf"{kind} (\d+)", block)
        if match:
            found.setdefault(int(match.group(1)), block)
    return found


def score(sample: TaskSample, answers: Sequence[str]) -> Parts:
    """Count the blocks that are there, and with a judge the events that are in them."""
    wanted: Blocks = sample.wanted
    blocks = blocks_in(wanted.prefix + sample.spoken(answers[0]), wanted.kind)
    there = len(blocks.keys() & set(range(1, wanted.number + 1)))
    # Officially only blocks that are there are judged (STIC-1); all of them: STIC-2.
    judged = [
        wanted.judge(blocks[block], event)
        for block, event in wanted.checks
        if wanted.judge is not None and block in blocks
    ]
    return {
        "completion": there / wanted.number,
        "one": 1,
        "included": sum(judged),
        "judged": len(judged),
        "checks": len(wanted.checks) if wanted.judge is not None else 0,
    }


def twin(size: TwinSize) -> list[TaskSample]:
    """Draw lists of calls, a block for each, with the call's text as its event."""
    samples = []
    for number, prompt in enumerate(draw(size, size.calls)):
        calls = json.loads(prompt.answer)
        events = tuple((call["n"], _block(call)) for call in calls)
        samples.append(
            TaskSample(
                name=f"synthetic-{number}",
                messages=record_messages(prompt.document, prompt.question),
                output_tokens=80 * size.calls,
                wanted=Blocks("", "Call", size.calls, events, _includes),
                spoken=_spoken,
            )
        )
    return samples


def _includes(block: str, event: str) -> bool:
    return event in block


def _block(call: Mapping[str, Any]) -> str:
    return json.dumps([call["name"], call["arguments"]], sort_keys=True)


def _spoken(answer: str) -> str:
    calls = numbered_calls(answer)
    return "".join(f"#*# Call {n}: {_block(call)}\n" for n, call in calls.items())


LONG_GEN_BENCH = Task(
    source=SOURCE,
    load=load,
    twin=twin,
    listed=True,
    score=score,
    figures={
        "completion rate": ("completion", "one"),
        "STIC-1": ("included", "judged"),
        "STIC-2": ("included", "checks"),
    },
)
