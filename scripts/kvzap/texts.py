"""Training texts of a regressor: documents of the generator, or a file."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from vericache_sglang import demo_records as records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

LENGTHS = (750, 1250)
"""Tokens of a text. Of similar length, so that attention is shared by as many."""


def documents(
    tokenizer: PreTrainedTokenizerBase, count: int, seed: int
) -> Iterator[str]:
    """Draw documents of user records, the system turns of the demo model.

    Args:
        tokenizer: Measures them.
        count: How many.
        seed: Of all of them; another one gives other documents.
    """
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        yield records.prompt_of_length(
            rng,
            rng.randint(*LENGTHS),
            lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
            filler=rng.choice((0.0, 0.1, 0.4)),
        ).document


def pieces(tokenizer: PreTrainedTokenizerBase, file: Path) -> list[str]:
    """Cut a text file into pieces; what is shorter than one is left out.

    Args:
        tokenizer: Measures them.
        file: UTF-8.

    Raises:
        ValueError: The file holds less than two pieces, one to train on and one to
            measure on.
    """
    ids = tokenizer.encode(file.read_text("utf-8"), add_special_tokens=False)
    length = sum(LENGTHS) // 2
    found = [
        tokenizer.decode(ids[start : start + length])
        for start in range(0, len(ids) - length + 1, length)
    ]
    if len(found) < 2:
        raise ValueError(
            f"{file}: {len(ids)} tokens are less than two pieces of {length}"
        )
    return found
