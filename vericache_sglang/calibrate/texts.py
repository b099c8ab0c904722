"""Prompts to measure on: text files, or the demo models' own documents."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from vericache_sglang.demo_records import prompt_of_length
from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DEMO_CALLS = {"demo-model": 1, "demo-model-long": 8}
"""Demo models of this repository, and the number of calls requested of each."""


def prompts(
    tokenizer: Any,
    folder: Path,
    texts: Sequence[Path],
    *,
    context: int,
    count: int,
    seed: int,
) -> list[list[int]]:
    """Return the token ids of prompts.

    A text of at most ``context`` tokens is one prompt, a longer one is cut. Without
    texts a demo model gets documents and requests as it was trained on.

    Args:
        tokenizer: Hugging Face tokenizer.
        folder: Folder of the model.
        texts: Text files, UTF-8.
        context: Maximum tokens of a prompt.
        count: Maximum number of prompts; of more, evenly spaced ones are taken.
        seed: Seed of the demo documents.

    Raises:
        ConfigError: A text cannot be read or is empty, or there is none; or a demo
            document does not fit.
    """
    if texts:
        cut = [p for file in texts for p in _cut(tokenizer, file, context)]
        step = max(1.0, len(cut) / count)
        return [cut[int(i * step)] for i in range(min(count, len(cut)))]
    calls = DEMO_CALLS.get(folder.resolve().name)
    if calls is None:
        raise ConfigError("--text FILE is needed: only demo models bring their own")
    rngs = [random.Random(f"{seed}/{number}") for number in range(count)]
    return [_demo(tokenizer, rng, context, calls) for rng in rngs]


def _cut(tokenizer: Any, file: Path, context: int) -> list[list[int]]:
    """Cut one text into prompts that begin with the model's first tokens (BOS).

    Raises:
        ConfigError: It cannot be read, or is empty.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {file}: cannot be read: {error}") from error
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ConfigError(f"--text {file}: is empty")
    first = tokenizer.bos_token_id
    begins = first is not None and tokenizer.encode("a")[0] == first
    begin = [first] if begins and ids[0] != first else []
    room = context - len(begin)
    pieces = [ids[at : at + room] for at in range(0, len(ids), room)]
    if len(pieces) > 1 and len(pieces[-1]) < room:
        pieces.pop()
    return [begin + piece for piece in pieces]


def _demo(tokenizer: Any, rng: random.Random, context: int, calls: int) -> list[int]:
    """Draw a demo prompt.

    Raises:
        ConfigError: ``context`` tokens do not hold ``calls`` records.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    try:
        prompt = prompt_of_length(
            rng, context, lambda text: len(encode(text)), calls=calls
        )
    except ValueError as error:
        raise ConfigError(f"--context: {error}") from error
    return encode(prompt.text)
