"""Output of the demo: answers with marked differences, a table, a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from demo.question import calls_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from demo.question import Answer, Question

WRONG = "bold red"
RIGHT = "green"


@dataclass(frozen=True)
class Result:
    """One system's answers.

    Attributes:
        name: Of the system, for people.
        answers: One for each question.
        seconds: Until the last of them was there; prompts were in the prefix cache.
    """

    name: str
    answers: Sequence[Answer]
    seconds: float

    @property
    def rate(self) -> float:
        """Output tokens per second, all requests together."""
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds

    def same_as(self, other: Result) -> list[bool]:
        """Say of each question whether both gave the same tokens."""
        pairs = zip(self.answers, other.answers, strict=True)
        return [mine.tokens == theirs.tokens for mine, theirs in pairs]

    def right(self, questions: Sequence[Question]) -> int:
        """Count the answers that match the records."""
        pairs = zip(self.answers, questions, strict=True)
        return sum(answer.text == question.answer for answer, question in pairs)


def marked(text: str, wanted: str) -> Iterator[Text]:
    """Yield an answer, a call a line, with what differs from ``wanted`` in red.

    Args:
        wanted: The answer it should be.
    """
    found, right = calls_of(text), calls_of(wanted)
    if found is None or right is None or len(found) != len(right):
        same = next(
            (i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b),
            min(len(text), len(wanted)),
        )
        yield Text.assemble("  ", (text[:same], RIGHT), (text[same:] or "...", WRONG))
        return
    for number, (call, good) in enumerate(zip(found, right, strict=True), start=1):
        line = Text(f"  {number}. ")
        same_name = call.get("name") == good["name"]
        line.append(str(call.get("name")), RIGHT if same_name else WRONG)
        for key in dict.fromkeys([*good["arguments"], *call["arguments"]]):
            value = call["arguments"].get(key, "missing")
            expected = good["arguments"].get(key)
            line.append(f" {key}=")
            line.append(str(value), RIGHT if value == expected else WRONG)
            if value != expected:
                line.append(f" (not {expected})", WRONG)
        yield line


def table(results: Sequence[Result], questions: Sequence[Question]) -> Table:
    """Return the table; the first result is what the others are compared with."""
    full = results[0]
    asked = len(questions)
    shown = Table(title=f"{asked} requests at once, {full.name} = 1")
    for column in ("", "tokens/s", "speed", "same tokens", "right answers"):
        shown.add_column(column, justify="left" if not column else "right")
    for result in results:
        same, right = sum(result.same_as(full)), result.right(questions)
        shown.add_row(
            result.name,
            f"{result.rate:.1f}",
            f"{result.rate / full.rate:.2f}x",
            Text(f"{same} of {asked}", RIGHT if same == asked else WRONG),
            f"{right} of {asked}",
        )
    return shown


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Write a PNG: speed, and how many answers are the full KV's.

    Args:
        results: The first is what the others are compared with.
    """
    from matplotlib.figure import Figure

    full = results[0]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    speed, same = figure.subplots(1, 2)
    names = [result.name for result in results]
    colours = [
        "tab:green" if all(result.same_as(full)) else "tab:red" for result in results
    ]
    rates = [result.rate for result in results]
    bars = speed.bar(names, rates, color=colours)
    speed.bar_label(bars, [f"{rate / full.rate:.2f}x" for rate in rates])
    speed.set(title="tokens/s, all requests together")
    counts = [sum(result.same_as(full)) for result in results]
    bars = same.bar(names, counts, color=colours)
    same.bar_label(bars, [f"{count} of {len(full.answers)}" for count in counts])
    same.set(title="answers equal to the full KV's")
    for axis in (speed, same):
        axis.margins(y=0.12)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
