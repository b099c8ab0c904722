"""Function calls in answers, and prompts of the demo model's records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vericache_sglang.demo_records import prompt_of_length

if TYPE_CHECKING:
    from vericache_sglang.demo_records import Prompt
    from vericache_sglang.evaluation.tasks.sample import Message, TwinSize


def calls_in(text: str) -> list[dict[str, Any]]:
    """Return the calls of an answer, each ``{"name", "arguments"}``, in its order.

    Every JSON object or array in the text is looked at, so the markers that models put
    around calls (``<tool_call>``, ``[TOOL_CALLS]``, a code fence) do not matter.
    ``parameters`` counts as ``arguments``; arguments that are a JSON text are parsed.
    """
    found: list[dict[str, Any]] = []
    decoder, at = json.JSONDecoder(), 0
    while (at := _next_bracket(text, at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        entries = value if isinstance(value, list) else [value]
        found += [call for call in map(_call, entries) if call is not None]
    return found


def _next_bracket(text: str, start: int) -> int:
    found = [at for at in (text.find("{", start), text.find("[", start)) if at >= 0]
    return min(found, default=-1)


def _call(entry: Any) -> dict[str, Any] | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get("arguments", entry.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return {"name": entry["name"], "arguments": arguments}


def numbered_calls(text: str) -> dict[int, dict[str, Any]]:
    """Return number -> call of the demo model's answer to a numbered list.

    A list that was cut still has its whole calls; the first of a number counts.
    """
    found: dict[int, dict[str, Any]] = {}
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find('{"n":', at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        if isinstance(value["n"], int) and _call(value) is not None:
            found.setdefault(value["n"], value)
    return found


def draw(size: TwinSize, calls: int) -> list[Prompt]:
    """Draw prompts over records.

    Raises:
        ValueError: A prompt of that many tokens does not hold ``calls`` records.
    """
    return [
        prompt_of_length(size.rng, size.tokens, size.count_tokens, calls=calls)
        for _ in range(size.count)
    ]


def record_messages(document: str, question: str) -> tuple[Message, ...]:
    """Return the turns as the demo model was trained on them."""
    system = {"role": "system", "content": document}
    return (system, {"role": "user", "content": question})
