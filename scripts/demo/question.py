"""One document of user records, several questions about it, and their answers."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from vericache_sglang.demo_records import (
    multi_request,
    prompt_of_length,
    prompt_text,
    system_turn,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.server import Server

SEED = 7


@dataclass(frozen=True)
class Question:
    """A request for tool calls.

    Attributes:
        text: A numbered list, one call an item.
        prompt: Token ids of document and question.
        answer: What the records say, JSON.
    """

    text: str
    prompt: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class Answer:
    """A server's answer to one request.

    Attributes:
        tokens: Token ids of the answer.
    """

    text: str
    tokens: tuple[int, ...]


class Document:
    """A prompt's tokenizer, document and questions.

    Args:
        model: Folder of the demo model; its tokenizer counts.
        tokens: Most tokens of a prompt.
        questions: How many; all are about the one document.
        calls: Tool calls that each asks for.
    """

    def __init__(self, model: Path, tokens: int, questions: int, calls: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        rng = random.Random(SEED)
        first = prompt_of_length(
            rng, tokens, lambda text: len(self._ids(text)), calls=calls
        )
        asked = [(first.question, first.answer)]
        asked += [
            multi_request(rng, first.records, calls) for _ in range(questions - 1)
        ]
        self.records = len(first.records)
        self.text = system_turn(first.document)
        self.questions = [
            Question(text, self._ids(prompt_text(first.document, text)), answer)
            for text, answer in asked
        ]

    @cached_property
    def tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(question.prompt) for question in self.questions)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def ask(server: Server, prompts: Sequence[Sequence[int]], most: int) -> list[Answer]:
    """Return the greedy answers to prompts, all sent at once.

    Args:
        prompts: Token ids of each.
        most: Tokens of an answer.

    Raises:
        ServerError: The server ended or refused.
    """
    body = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": {"temperature": 0, "max_new_tokens": most},
    }
    found: list[dict[str, Any]] = server.generate(body)
    return [Answer(each["text"], tuple(each["output_ids"])) for each in found]


def calls_of(text: str) -> list[dict[str, Any]] | None:
    """Return the tool calls of an answer; None where it is no list of calls."""
    try:
        calls = json.loads(text)
    except ValueError:
        return None
    right = isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("arguments"), dict)
        for call in calls
    )
    return calls if right else None
