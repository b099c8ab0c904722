"""ComplexFuncBench: chains of function calls, matched with recorded ones.

The official matching in its order, without the steps that need an embedding model, the
live service or a judge: a call that only those would accept counts as wrong, which is
the paper's "exactly matching arguments". Where the official runner aligns calls by
embedding, ours takes the golden call with the same name and most equal arguments.

Defects of the official runner handled here: it stops with ``NotImplementedError`` where
every golden call left was made ahead (here the chain ends as it stands), and with
``KeyError`` where a call of ``Search_Hotels`` has no ``search_type``.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vericache_sglang.demo_records import FUNCTIONS, request
from vericache_sglang.evaluation.tasks.calls import calls_in, draw, record_messages
from vericache_sglang.evaluation.tasks.sample import Files, Task, TaskSample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.tasks.sample import Message, Parts, TwinSize

    Call = dict[str, Any]

SOURCE = (
    "ComplexFuncBench.jsonl of the hub data set zai-org/ComplexFuncBench (Apache-2.0)"
)
FILES = Files(SOURCE)

SEARCH = re.compile(r"Search_\w+_(Location|Destination)|Taxi_Search_Location")
"""Functions that find a place's id: they may be called at any time, or not at all."""

TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
}
"""Types of arguments that are checked; the others pass, as officially."""

REFUSED = {
    "api_status": True,
    "content": "There is a problem with your api call, please double-check for "
    "possible problems.",
}
"""What a call gets that matches nothing, in the official runner's words."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The recorded calls of one sample.

    Attributes:
        steps: (calls, their observations) of each step.
        functions: Name -> definition.
        role: Of the messages that hold observations.
        closes: The conversation ends with a text; else with the last golden call.
    """

    steps: tuple[tuple[list[Call], list[Any]], ...]
    functions: Mapping[str, Any]
    role: str = "tool"
    closes: bool = True


@dataclass
class Matching:
    """A conversation being matched with its chain, as the official runner does.

    Attributes:
        chain: What was recorded.
        correct: Calls that matched so far.
        state: "" while it goes on, then ``success`` or what went wrong.
    """

    chain: Chain
    correct: int = 0
    state: str = ""
    _step: int = 0
    _golden: list[tuple[Call, Any]] = field(default_factory=list)
    _free: dict[str, Any] = field(default_factory=dict)
    _called: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for calls, observations in self.chain.steps:
            for call, observation in zip(calls, observations, strict=True):
                if _is_free(call):
                    self._free.setdefault(_key(call), observation)
        self._golden = self._recorded(0)
        if self._only_free():
            self._next()

    def answer(self, text: str) -> list[Any]:
        """Match one answer; returns the observations of its calls, none at the end."""
        predicted = calls_in(text)
        if not predicted:
            self._close()
            return []
        if not self._golden:
            self.state = "called on after the last golden call"
            return []
        self._golden = [
            pair for pair in self._golden if _key(pair[0]) not in self._called
        ]
        if not self._golden:
            self.state = "every golden call left was made ahead"
            return []
        found, matched, unformatted = self._match(predicted)
        if not found and not unformatted:
            self.state = "no call matched"
            return []
        self.correct += len(found)
        self._take(matched)
        if not self.chain.closes and not self._golden:
            self._close()
        return [
            found.get(i, unformatted.get(i, REFUSED)) for i in range(len(predicted))
        ]

    def _match(
        self, predicted: list[Call]
    ) -> tuple[dict[int, Any], list[Call], dict[int, Any]]:
        """Return observations of right calls, golden calls met, errors of format."""
        pairs, left = [], []
        golden = list(self._golden)
        for i, call in enumerate(predicted):
            same = next((pair for pair in golden if pair[0] == call), None)
            if same is not None:
                golden.remove(same)
                pairs.append((i, *same))
            elif (key := _key(call)) in self._free:
                self._called.add(key)
                pairs.append((i, call, self._free[key]))
            else:
                left.append(i)
        for i in left:
            if not golden:
                break
            best = max(golden, key=lambda pair: _likeness(predicted[i], pair[0]))
            golden.remove(best)
            pairs.append((i, *best))
        found, matched, unformatted = {}, [], {}
        for i, call, observation in pairs:
            error = format_error(predicted[i], self.chain.functions)
            if error:
                unformatted[i] = {"error": error}
            elif same_call(predicted[i], call):
                found[i] = observation
                matched.append(call)
        return found, matched, unformatted

    def _take(self, matched: list[Call]) -> None:
        for call in matched:
            at = next((i for i, p in enumerate(self._golden) if p[0] == call), None)
            if at is not None:
                del self._golden[at]
        if matched:
            self._next()
        left = self._golden
        self._golden = [pair for pair in left if _key(pair[0]) not in self._called]
        if self._only_free():
            self._next()

    def _close(self) -> None:
        left = [call for call, _ in self._golden if not _optional(call)]
        done = self._step >= len(self.chain.steps)
        self.state = "success" if done and not left else "stopped early"

    def _next(self) -> None:
        self._step += 1
        if self._step < len(self.chain.steps):
            self._golden += self._recorded(self._step)

    def _recorded(self, step: int) -> list[tuple[Call, Any]]:
        return copy.deepcopy([*zip(*self.chain.steps[step], strict=True)])

    def _only_free(self) -> bool:
        calls = [call for call, _ in self._golden]
        searched = any(_searches_hotels(call) for call in calls)
        return searched or all(map(_is_free, calls))


def _key(call: Call) -> str:
    return json.dumps(call, sort_keys=True)


def _is_free(call: Call) -> bool:
    name = call["name"]
    return name == "Location_to_Lat_Long" or bool(SEARCH.fullmatch(name))


def _searches_hotels(call: Call) -> bool:
    if call["name"] != "Search_Hotels":
        return False
    return bool(call["arguments"].get("search_type") == "hotel")


def _optional(call: Call) -> bool:
    return bool(SEARCH.fullmatch(call["name"])) or _searches_hotels(call)


def _likeness(call: Call, golden: Call) -> tuple[bool, int]:
    equal = call["arguments"].items()
    same = sum(golden["arguments"].get(key) == value for key, value in equal)
    return call["name"] == golden["name"], same


def format_error(call: Call, functions: Mapping[str, Any]) -> str:
    """Return what is wrong with a call's form by its function's definition; "" for ok.

    Args:
        call: ``name`` and ``arguments``.
        functions: Name -> definition with ``parameters``.
    """
    if call["name"] not in functions:
        return f"Function {call['name']} is not defined in the function list."
    parameters = functions[call["name"]]["parameters"]
    given, known = call["arguments"], parameters["properties"]
    missing = sorted(set(parameters.get("required", ())) - given.keys())
    if missing:
        return f"Function {call['name']} requires parameters {missing}"
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        return f"Function {call['name']} does not have parameters {unknown}"
    for name, value in given.items():
        kind = known[name].get("type")
        if not isinstance(value, TYPES.get(kind, (object,))):
            return f"Parameter {name} of function {call['name']} should be a {kind}"
    return ""


def same_call(call: Call, golden: Call) -> bool:
    """Return whether two calls are the same; lists of filters in any order."""
    given, wanted = call["arguments"], golden["arguments"]
    if call["name"] != golden["name"] or given.keys() != wanted.keys():
        return False
    return all(
        value == wanted[name]
        or (name == "categories_filter" and _filters(value) == _filters(wanted[name]))
        for name, value in given.items()
    )


def _filters(value: Any) -> set[str]:
    return {part.strip() for part in str(value).split(",")}


def load(folder: Path) -> list[TaskSample]:
    """Read ``ComplexFuncBench.jsonl``.

    Raises:
        ConfigError: It is missing, or a record is malformed.
    """
    return [_sample(*pair) for pair in FILES.lines(folder / "ComplexFuncBench.jsonl")]


def _sample(where: str, record: Mapping[str, Any]) -> TaskSample:
    turns = FILES.field(where, record, "conversations", list)
    functions = FILES.field(where, record, "functions", list)
    for number, function in enumerate(functions):
        place = f"{where}, functions {number}"
        FILES.field(place, function, "name", str)
        parameters = FILES.field(place, function, "parameters", dict)
        FILES.field(place, parameters, "properties", dict)
    first, steps = _turns(where, turns)
    return TaskSample(
        name=FILES.field(where, record, "id", str),
        messages=({"role": "user", "content": first},),
        tools=tuple({"type": "function", "function": each} for each in functions),
        output_tokens=2048,
        wanted=Chain(steps, {each["name"]: each for each in functions}),
    )


def _turns(
    where: str, turns: list[Any]
) -> tuple[str, tuple[tuple[list[Call], list[Any]], ...]]:
    """Return the query, and the calls and observations of each step."""
    calls: list[list[Call]] = []
    observations: list[list[Any]] = []
    query = ""
    for number, turn in enumerate(turns):
        place = f"{where}, conversations {number}"
        role = FILES.field(place, turn, "role", str)
        if "function_call" in turn:
            found = FILES.field(place, turn, "function_call", list)
            for call in found:
                FILES.field(place, call, "name", str)
                FILES.field(place, call, "arguments", dict)
            calls.append(found)
        elif role == "observation":
            given = FILES.field(place, turn, "content", list, str)
            observations.append(given if isinstance(given, list) else [given])
        elif number == 0:
            query = FILES.field(place, turn, "content", str)
    counts = [len(each) for each in calls], [len(each) for each in observations]
    if not calls or counts[0] != counts[1]:
        message = f"field conversations: {counts[0]} calls, {counts[1]} observations"
        raise FILES.fail(where, message)
    return query, tuple(zip(calls, observations, strict=True))


def score(sample: TaskSample, answers: Sequence[str]) -> Parts:
    """Match a conversation's answers with its chain."""
    matching = _matched(sample, answers)[0]
    golden = sum(len(calls) for calls, _ in sample.wanted.steps)
    success = float(matching.state == "success")
    return {"correct": matching.correct, "golden": golden, "ended": success, "one": 1}


def follow(sample: TaskSample, answers: Sequence[str]) -> list[Message] | None:
    """Return the observations of the last answer's calls; None at the end."""
    matching, observations = _matched(sample, answers)
    if matching.state or not observations:
        return None
    role = sample.wanted.role
    if role != "tool":
        return [{"role": role, "content": str(each)} for each in observations]
    names = [call["name"] for call in calls_in(sample.spoken(answers[-1]))]
    return [
        {"role": role, "name": name, "content": json.dumps(each, ensure_ascii=False)}
        for name, each in zip(names, observations, strict=True)
    ]


def _matched(sample: TaskSample, answers: Sequence[str]) -> tuple[Matching, list[Any]]:
    matching, observations = Matching(sample.wanted), list[Any]()
    for answer in answers:
        if matching.state:
            break
        observations = matching.answer(sample.spoken(answer))
    return matching, observations


def twin(size: TwinSize) -> list[TaskSample]:
    """Draw chains of two calls: what the first returns asks for the second."""
    samples = []
    for number, prompt in enumerate(draw(size, 1)):
        asked = json.loads(prompt.answer)["arguments"]["id"]
        others = [entry for entry in prompt.records if entry.id != asked]
        second, answer = request(size.rng, size.rng.choice(others or prompt.records))
        functions = [_definition(name) for name in sorted(FUNCTIONS)]
        steps = (
            ([json.loads(prompt.answer)], [second]),
            ([json.loads(answer)], ["done"]),
        )
        named = {each["name"]: each for each in functions}
        samples.append(
            TaskSample(
                name=f"synthetic-{number}",
                messages=record_messages(prompt.document, prompt.question),
                output_tokens=96,
                wanted=Chain(steps, named, role="user", closes=False),
            )
        )
    return samples


def _definition(name: str) -> dict[str, Any]:
    spec = FUNCTIONS[name]
    fields = {"id": {"type": "string"}}
    fields |= {each: {"type": "string"} for each in spec.fields}
    for key, value in json.loads(f"{{{spec.constants}}}").items():
        fields[key] = {"type": "boolean" if isinstance(value, bool) else "string"}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return {"name": name, "description": name, "parameters": parameters}


COMPLEX_FUNC_BENCH = Task(
    source=SOURCE,
    load=load,
    twin=twin,
    score=score,
    follow=follow,
    figures={"call accuracy": ("correct", "golden"), "success": ("ended", "one")},
)
