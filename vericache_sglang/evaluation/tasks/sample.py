"""A sample of a task, the task itself, and what reads the files of data sets."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError, quoted

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    Message = dict[str, Any]
    """OpenAI's: ``role``, ``content`` and so on."""

    Parts = dict[str, float]
    """Sums of one sample's score; a figure is the ratio of two of them."""


def unchanged(answer: str) -> str:
    """Return an answer as it is."""
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSample:
    """One prompt of a data set, or the beginning of one conversation.

    Attributes:
        name: Unique in its task.
        messages: In OpenAI's form; empty where there is ``text``.
        text: A prompt to be continued, without a chat template.
        tools: Functions the model may call, in OpenAI's form.
        output_tokens: Most of one answer, as the data set's own runner asks.
        sampling: Its runner's further sampling parameters, by SGLang's names.
        wanted: What its task's scoring compares answers with.
        session: Conversation that it is a part of; "" for none.
        gap: Seconds after the session's previous answer at which it arrives.
        spoken: Rewrites an answer into the task's format: the demo model answers with
            JSON tool calls only.
    """

    name: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    output_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    wanted: Any = None
    session: str = ""
    gap: float = 0.0
    spoken: Callable[[str], str] = unchanged


@dataclass(frozen=True, slots=True)
class TwinSize:
    """How large the samples of a synthetic twin are.

    Attributes:
        rng: The only source of randomness; advanced.
        count: Samples.
        tokens: Most of a prompt; it is short by about one record.
        count_tokens: Token count of a text in the demo model's tokenizer.
        calls: Tool calls of an answer that is a list.
    """

    rng: random.Random
    count: int
    tokens: int
    count_tokens: Callable[[str], int]
    calls: int = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A data set with its official scoring.

    Attributes:
        source: Where it is to be had, and its licence.
        load: Reads it from a folder.
        twin: Draws samples of the same format, as records of the official files, that
            the demo model answers.
        score: From a sample and its answers to sums.
        figures: Name -> (sum, sum): the figure is the ratio of their totals.
        listed: Whether the twin's answers are lists of calls.
        follow: From a sample and the answers so far to the next messages; None: the
            conversation has ended.
    """

    source: str
    load: Callable[[Path], list[TaskSample]]
    twin: Callable[[TwinSize], list[TaskSample]]
    score: Callable[[TaskSample, Sequence[str]], Parts]
    figures: Mapping[str, tuple[str, str]]
    listed: bool = False
    follow: Callable[[TaskSample, Sequence[str]], list[Message] | None] = (
        lambda sample, answers: None
    )


def totals(task: Task, parts: Sequence[Parts]) -> dict[str, float | None]:
    """Return a task's figures over samples; None where nothing counts.

    Args:
        parts: What ``score`` returned for each sample.
    """
    found: dict[str, float | None] = {}
    for name, (above, below) in task.figures.items():
        whole = sum(each[below] for each in parts)
        found[name] = sum(each[above] for each in parts) / whole if whole else None
    return found


@dataclass(frozen=True, slots=True)
class Files:
    """Reads a data set's files; everything wrong with one is a ``ConfigError``.

    Attributes:
        source: Where the data set is to be had; ends every message.
    """

    source: str

    def fail(self, where: object, message: str) -> ConfigError:
        """Return the error that names a place in a file."""
        return ConfigError(f"--data {where}: {message}. The data set: {self.source}")

    def text(self, file: Path) -> str:
        """Return a file's content.

        Raises:
            ConfigError: It is missing, or no text in UTF-8.
        """
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise self.fail(file, f"cannot be read: {error}") from error

    def lines(self, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (place, object) of every line of a file of JSON lines.

        Raises:
            ConfigError: The file is missing or empty, or a line is no whole object.
        """
        empty = True
        for number, line in enumerate(self.text(file).splitlines(), start=1):
            if not line.strip():
                continue
            empty, where = False, f"{file}, line {number}"
            try:
                found = json.loads(line)
            except ValueError as error:
                raise self.fail(where, f"no whole JSON: {error}") from error
            yield where, self._object(where, found)
        if empty:
            raise self.fail(file, "is empty")

    def array(self, file: Path) -> list[tuple[str, dict[str, Any]]]:
        """Return (place, object) of every entry of a JSON array.

        Raises:
            ConfigError: The file is missing, cut or no array of objects.
        """
        text = self.text(file)
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            where = f"{file}, line {error.lineno}"
            raise self.fail(where, f"no whole JSON: {error.msg}") from error
        if not isinstance(found, list) or not found:
            raise self.fail(file, "wanted a JSON array with entries")
        places = [f"{file}, entry {number}" for number in range(len(found))]
        pairs = zip(places, found, strict=True)
        return [(where, self._object(where, each)) for where, each in pairs]

    def field(
        self, where: str, record: Mapping[str, Any], name: str, *kinds: type
    ) -> Any:
        """Return a field of a record.

        Args:
            where: The record's place.
            kinds: Types it may have; a bool is no number.

        Raises:
            ConfigError: It is missing or of another type.
        """
        wanted = " or ".join(kind.__name__ for kind in kinds)
        if name not in record:
            has = ", ".join(sorted(record)) or "none"
            raise self.fail(where, f"field {name} ({wanted}) is missing; it has {has}")
        value = record[name]
        is_number = isinstance(value, bool) and bool not in kinds
        if not isinstance(value, kinds) or is_number:
            raise self.fail(
                where, f"field {name}: wanted {wanted}, got {quoted(value)}"
            )
        return value

    def _object(self, where: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(where, f"wanted an object, got {quoted(value)}")
        return value
