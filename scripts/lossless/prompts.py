"""Prompts of 200 to 8,000 tokens: demo documents, tool calls and source code."""

from __future__ import annotations

import random
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

from demo_model import records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE = (tokenize.__file__, random.__file__)
"""Source files every Python 3.11 has; their text is the code prompts."""


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """Load a demo model's tokenizer from its folder."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model)


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Count the tokens of ``text``, special tokens written out included."""
    return len(tokenizer.encode(text, add_special_tokens=False))


def record_prompts(
    tokenizer: PreTrainedTokenizerBase,
    lengths: list[int],
    seed: int,
    calls: int | None = None,
) -> list[str]:
    """Draw one document prompt per entry of ``lengths``, of about that many tokens.

    Each asks for ``calls`` tool calls; None asks for one, and for more in longer ones.
    """
    rng = random.Random(seed)
    return [
        records.prompt_of_length(
            rng,
            length,
            lambda text: count_tokens(tokenizer, text),
            calls=calls or (1 if i % 2 else min(5, 1 + length // 300)),
        ).text
        for i, length in enumerate(lengths)
    ]


def code_prompts(
    tokenizer: PreTrainedTokenizerBase, lengths: list[int], seed: int
) -> list[str]:
    """Cut one piece of Python source per entry of ``lengths``, of that many tokens."""
    rng = random.Random(seed)
    texts = [Path(file).read_text(encoding="utf-8") for file in CODE]
    prompts = []
    for length in lengths:
        ids = tokenizer.encode(rng.choice(texts), add_special_tokens=False)
        start = rng.randrange(max(1, len(ids) - length))
        prompts.append(tokenizer.decode(ids[start : start + length]))
    return prompts


def spread(count: int, least: int, most: int) -> list[int]:
    """Return ``count`` lengths in tokens, ``least`` to ``most`` in equal ratios."""
    step = (most / least) ** (1 / max(1, count - 1))
    return [round(least * step**i) for i in range(count)]
