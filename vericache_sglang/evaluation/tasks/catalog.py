"""The table of tasks, and their samples."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.tasks.complex_func_bench import COMPLEX_FUNC_BENCH
from vericache_sglang.evaluation.tasks.gsm8k_long import GSM8K_LONG
from vericache_sglang.evaluation.tasks.lmcache_trace import LMCACHE_TRACE
from vericache_sglang.evaluation.tasks.long_gen_bench import LONG_GEN_BENCH
from vericache_sglang.evaluation.tasks.pisanitizer import PISANITIZER
from vericache_sglang.evaluation.tasks.sample import TwinSize
from vericache_sglang.evaluation.workload import DEMO_CALLS, count_tokens

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from vericache_sglang.evaluation.tasks.sample import Message, Task, TaskSample

TASKS: Mapping[str, Task] = {
    "lmcache-trace": LMCACHE_TRACE,
    "complex-func-bench": COMPLEX_FUNC_BENCH,
    "pisanitizer": PISANITIZER,
    "long-gen-bench": LONG_GEN_BENCH,
    "gsm8k-long": GSM8K_LONG,
}
"""By the name of ``--tasks``; also the folder of its files under ``--data``."""

SYNTHETIC = "synthetic"

SAMPLING: Mapping[str, tuple[Any, str]] = {
    "tasks": ([*TASKS], "data sets"),
    "data": (SYNTHETIC, "folder of the data sets' own files, one below it a task"),
    "samples": (4, "of each task, in the files' order"),
    "context": (1500, "tokens of a synthetic prompt, at most"),
}
"""The options that ``samples_of`` reads, besides ``model`` and ``seed``."""


def samples_of(
    options: argparse.Namespace, tokenizer: Any
) -> dict[str, list[TaskSample]]:
    """Return each task's samples, read from its files or drawn.

    Args:
        options: With ``SAMPLING``, the model's folder and the seed.
        tokenizer: The model's.

    Raises:
        ConfigError: An option is out of bounds, a task is unknown, or its data is
            missing or malformed.
    """
    unknown = [name for name in options.tasks if name not in TASKS]
    if unknown:
        raise ConfigError(f"--tasks {unknown[0]}; known: {', '.join(TASKS)}")
    if options.samples < 1:
        raise ConfigError("--samples must be >= 1")
    return {name: _samples(options, name, tokenizer) for name in options.tasks}


def prompt_of(
    tokenizer: Any, sample: TaskSample, messages: Sequence[Message]
) -> str | None:
    """Return a conversation rendered by the model's chat template; None: no template.

    Args:
        tokenizer: The model's.
        sample: Has the tools; one with ``text`` is asked without a template.
        messages: The conversation so far.
    """
    if sample.text:
        return None
    text: str = tokenizer.apply_chat_template(
        list(messages),
        tools=list(sample.tools) or None,
        add_generation_prompt=True,
        tokenize=False,
    )
    return text


def _samples(
    options: argparse.Namespace, name: str, tokenizer: Any
) -> list[TaskSample]:
    if options.data != SYNTHETIC:
        folder = Path(options.data)
        own = folder / name
        return TASKS[name].load(own if own.is_dir() else folder)[: options.samples]
    calls = DEMO_CALLS.get(options.model.name, 0)
    if calls < 1 + TASKS[name].listed:
        able = [model for model, n in DEMO_CALLS.items() if n > TASKS[name].listed]
        raise ConfigError(
            f"--data synthetic: only {' and '.join(able)} can answer the twin of "
            f"{name}; give --data DIR, or other --tasks"
        )
    try:
        return TASKS[name].twin(
            TwinSize(
                random.Random(options.seed),
                options.samples,
                options.context,
                partial(count_tokens, tokenizer),
                calls,
            )
        )
    except ValueError as error:
        raise ConfigError(f"--context: {error}") from error
