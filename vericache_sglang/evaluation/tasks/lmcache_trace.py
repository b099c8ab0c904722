"""LMCache's traces of agents: KL against the full KV, and arrivals to be replayed.

Two forms: (a) the hub data set's parquet files, with OpenAI messages; (b) the trace
repository's JSON lines, with prompts as text. Outputs are what another model said at
the time, so nothing is scored against them: the metric is the KL to the full KV.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vericache_sglang.demo_records import document, request, system_turn
from vericache_sglang.evaluation.tasks.calls import record_messages
from vericache_sglang.evaluation.tasks.sample import Files, Task, TaskSample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.tasks.sample import Parts, TwinSize

SOURCE = (
    "data/train-*.parquet of the hub data set sammshen/lmcache-agentic-traces (MIT), "
    "or *.jsonl of github.com/LMCache/lmcache-agent-trace (Apache-2.0)"
)
FILES = Files(SOURCE)
OUTPUT_TOKENS = 512
"""Of calls that do not say how many they had: form (b)."""

TURNS = 3
"""Of a synthetic session."""


def load(folder: Path) -> list[TaskSample]:
    """Read either form; form (a) where there are parquet files.

    Raises:
        ConfigError: There is no file of either form, or a record is malformed.
    """
    if tables := sorted(folder.rglob("train-*.parquet")):
        return from_rows(pair for file in tables for pair in _parquet(file))
    if files := sorted(folder.rglob("*.jsonl")):
        return from_lines(pair for file in files for pair in FILES.lines(file))
    raise FILES.fail(folder, "has no train-*.parquet and no *.jsonl")


def from_rows(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> list[TaskSample]:
    """Return a sample for every (place, row) of form (a)."""
    samples, turns = [], dict[str, int]()
    for where, row in rows:
        session = FILES.field(where, row, "session_id", str)
        messages = FILES.field(where, row, "input", list)
        gap = row.get("pre_gap")
        if gap is not None and not (isinstance(gap, (int, float)) and gap >= 0):
            raise FILES.fail(where, f"field pre_gap: wanted seconds >= 0, got {gap!r}")
        turn = turns[session] = turns.get(session, -1) + 1
        samples.append(
            TaskSample(
                name=f"{session}/{turn}",
                messages=tuple(_message(where, each) for each in messages),
                output_tokens=max(1, FILES.field(where, row, "output_length", int)),
                session=session,
                gap=float(gap or 0.0),
            )
        )
    return samples


def from_lines(lines: Iterable[tuple[str, Mapping[str, Any]]]) -> list[TaskSample]:
    """Return a sample for every (place, line) of form (b), each session by time.

    A call's gap is the time since its session's previous one began: when that ended
    is not recorded.
    """
    calls: dict[str, list[tuple[int, str, bool]]] = {}
    for where, line in lines:
        session = FILES.field(where, line, "session_id", str)
        at = FILES.field(where, line, "timestamp", int)
        text = FILES.field(where, line, "input", str)
        # Steps of the agent that asked no model have an empty input or output.
        asked = bool(text and FILES.field(where, line, "output", str))
        calls.setdefault(session, []).append((at, text, asked))
    samples = []
    for session, found in calls.items():
        before = None
        for turn, (at, text, asked) in enumerate(sorted(found)):
            if not asked:
                continue
            samples.append(
                TaskSample(
                    name=f"{session}/{turn}",
                    messages=({"role": "user", "content": text},),
                    output_tokens=OUTPUT_TOKENS,
                    session=session,
                    gap=0.0 if before is None else (at - before) / 1e6,
                )
            )
            before = at
    return samples


def twin(size: TwinSize) -> list[TaskSample]:
    """Draw sessions of several turns over one document each, as rows of form (a)."""
    rows: list[tuple[str, dict[str, Any]]] = []
    for number in range(-(-size.count // TURNS)):
        drawn, text = _document(size)
        turns: list[dict[str, Any]] = [{"role": "system", "content": text}]
        for entry in size.rng.sample(drawn, TURNS):
            question, answer = request(size.rng, entry)
            turns.append(record_messages("", question)[1])
            row = {
                "session_id": f"synthetic-{number}",
                "model": "demo",
                "input": list(turns),
                "output_length": 80,
                "pre_gap": round(size.rng.expovariate(2.0), 3),
            }
            rows.append((f"synthetic, row {len(rows)}", row))
            turns.append({"role": "assistant", "content": answer})
    return from_rows(rows[: size.count])


def _document(size: TwinSize) -> tuple[list[Any], str]:
    """Draw a document that leaves room for the turns."""
    room = size.tokens - 75 * TURNS
    count = max(TURNS, room // 34)
    while True:
        drawn, text = document(size.rng, count, 0.1)
        if size.count_tokens(system_turn(text)) <= room or count == TURNS:
            return drawn, text
        count = max(TURNS, count - 1 - count // 20)


def score(sample: TaskSample, answers: Sequence[str]) -> Parts:
    """Return nothing to compare: only the distance from the full KV is measured."""
    return {}


def _message(where: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise FILES.fail(where, "field input: wanted messages with role and content")
    FILES.field(where, given, "role", str)
    # The reader of the table fills fields that a message lacks with None.
    message = {key: value for key, value in given.items() if value is not None}
    message.setdefault("content", "")
    calls = message.get("tool_calls") or []
    if calls:
        message["tool_calls"] = [_tool_call(where, call) for call in calls]
    else:
        message.pop("tool_calls", None)
    return message


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    """Return a call whose arguments are parsed, as chat templates want them."""
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        return {**call, "function": {"name": function["name"], "arguments": arguments}}
    except (TypeError, KeyError, ValueError) as error:
        raise FILES.fail(where, f"field tool_calls: {error!r}") from error


def _parquet(file: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow  # type: ignore[import-not-found]
        from pyarrow import parquet
    except ImportError as error:
        raise FILES.fail(file, "needs pyarrow: pip install pyarrow") from error
    try:
        rows = parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise FILES.fail(file, f"is cut or no parquet: {error}") from error
    return [(f"{file}, row {number}", row) for number, row in enumerate(rows)]


LMCACHE_TRACE = Task(source=SOURCE, load=load, twin=twin, score=score, figures={})
