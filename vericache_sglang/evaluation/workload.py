"""Prompts, the requests every system answers, and when they arrive in an open loop."""

from __future__ import annotations

import json
import random
import tokenize
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.demo_records import Prompt, prompt_of_length
from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

DEMO_CALLS = {"demo-model": 1, "demo-model-long": 6}
"""Demo models of this repository, and how many tool calls an answer of theirs has."""

CODE = (tokenize.__file__, random.__file__)
"""Source files every Python has; their text is the code prompts."""

SPECIAL = 16
"""First token ids, which random prompts leave out: models keep markers there."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One greedy request.

    Attributes:
        prompt: Its text, or its token ids.
        output_tokens: Tokens of the answer; exactly so many unless it may end early.
    """

    prompt: str | tuple[int, ...]
    output_tokens: int

    def body(self, *, ends: bool) -> dict[str, Any]:
        """Return the body of ``POST /generate``.

        Args:
            ends: The answer may end before ``output_tokens``.
        """
        is_text = isinstance(self.prompt, str)
        prompt = {"text": self.prompt} if is_text else {"input_ids": [*self.prompt]}
        return {
            **prompt,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": self.output_tokens,
                "ignore_eos": not ends,
            },
        }


def read_requests(file: Path, output_tokens: int) -> list[BenchRequest]:
    """Read requests from JSON lines: ``prompt`` or ``input_ids``, ``output_tokens``.

    Args:
        file: One object a line; empty lines are skipped.
        output_tokens: For lines that do not say.

    Raises:
        ConfigError: The file cannot be read or is empty, or a line is malformed.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--requests {file}: {error}") from error
    found = [
        _request(f"--requests {file}, line {number}", line, output_tokens)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"--requests {file}: has no line")
    return found


def _request(where: str, line: str, output_tokens: int) -> BenchRequest:
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(given, dict) or ("prompt" in given) == ("input_ids" in given):
        raise ConfigError(f"{where}: must be an object with prompt or input_ids")
    tokens = given.get("output_tokens", output_tokens)
    if not _is_count(tokens):
        raise ConfigError(f"{where}: output_tokens must be >= 1, got {tokens!r}")
    if "prompt" in given:
        if not isinstance(given["prompt"], str) or not given["prompt"]:
            raise ConfigError(f"{where}: prompt must be a text")
        return BenchRequest(given["prompt"], tokens)
    ids = given["input_ids"]
    if not isinstance(ids, list) or not ids or not all(map(_is_token, ids)):
        raise ConfigError(f"{where}: input_ids must be token ids")
    return BenchRequest(tuple(ids), tokens)


def _is_count(value: object) -> bool:
    return _is_token(value) and value != 0


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def random_requests(
    model: Path, lengths: list[int], output_tokens: int, seed: int
) -> list[BenchRequest]:
    """Draw prompts of random tokens; for weights that make no sense of text anyway.

    Args:
        model: Folder with the config.json that says how many tokens there are.
        lengths: Tokens of each prompt.
        seed: Other seeds give other prompts.

    Raises:
        ConfigError: The vocabulary's size cannot be read.
    """
    config = model / "config.json"
    try:
        vocabulary = int(json.loads(config.read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--model: vocab_size of {config}: {error!r}") from error
    rng = random.Random(seed)
    return [
        BenchRequest(
            tuple(rng.randrange(SPECIAL, vocabulary) for _ in range(length)),
            output_tokens,
        )
        for length in lengths
    ]


def demo_requests(
    model: Path, lengths: list[int], output_tokens: int, seed: int
) -> list[BenchRequest]:
    """Draw documents and tool calls as the demo models were trained on.

    Args:
        model: Folder of a demo model.
        lengths: Most tokens of each prompt; it is short by about one record.
        seed: Other seeds give other prompts.

    Raises:
        ConfigError: It is another model, or a length is too short.
    """
    calls = DEMO_CALLS.get(model.resolve().name)
    if calls is None:
        raise ConfigError(
            "--requests FILE or --random-prompts is needed: only the demo models of "
            "this repository bring prompts of their own"
        )
    try:
        texts = record_prompts(load_tokenizer(model), lengths, seed, calls)
    except ValueError as error:
        raise ConfigError(f"--context: {error}") from error
    return [BenchRequest(text, output_tokens) for text in texts]


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """Load a demo model's tokenizer from its folder."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model)


def open_tokenizer(model: Path) -> Any:
    """Load any model's tokenizer.

    Args:
        model: Folder, or name on a hub.

    Raises:
        ConfigError: It cannot be loaded.
    """
    from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

    define_missing_ops()  # before transformers looks for torchvision
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model}: {error}") from error


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Count the tokens of ``text``, special tokens written out included."""
    return len(tokenizer.encode(text, add_special_tokens=False))


def tool_call_prompts(
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    seed: int,
    calls: int | None = None,
) -> list[Prompt]:
    """Draw one document with its request and answer per entry of ``lengths``.

    Args:
        tokenizer: The demo model's.
        lengths: Most tokens of each prompt; it is short by about one record.
        seed: Other seeds give other documents.
        calls: Tool calls each asks for; None: one, and more in longer ones.

    Raises:
        ValueError: A length does not hold ``calls`` records.
    """
    rng, count = random.Random(seed), partial(count_tokens, tokenizer)
    return [
        prompt_of_length(
            rng,
            length,
            count,
            calls=calls or (1 if i % 2 else min(5, 1 + length // 300)),
        )
        for i, length in enumerate(lengths)
    ]


def record_prompts(
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    seed: int,
    calls: int | None = None,
) -> list[str]:
    """Return the prompt texts of ``tool_call_prompts``."""
    return [
        prompt.text for prompt in tool_call_prompts(tokenizer, lengths, seed, calls)
    ]


def code_prompts(
    tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], seed: int
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


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return the arrival times of a Poisson process, in seconds; the first is 0.

    The same seed gives the same pattern at every rate, stretched.

    Args:
        count: Requests.
        rate: Of them a second, > 0.
        seed: Other seeds give other patterns.
    """
    rng, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(at)
        at += rng.expovariate(1.0) / rate
    return times
