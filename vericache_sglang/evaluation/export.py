"""Writes task samples as files that the load generators of SGLang and vLLM read."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import VeriCacheError
from vericache_sglang.evaluation.benchmark import DEMO_LONG
from vericache_sglang.evaluation.options import add_options
from vericache_sglang.evaluation.report import publish
from vericache_sglang.evaluation.tasks.catalog import SAMPLING, prompt_of, samples_of
from vericache_sglang.evaluation.workload import open_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vericache_sglang.evaluation.tasks.sample import Message, TaskSample

PROGRAM = "python -m vericache_sglang.workload"


def as_openai(samples: Sequence[TaskSample], tokenizer: Any) -> str:
    """Return ``sglang.bench_serving --dataset-name openai``: a request per line.

    A sample without messages becomes one user message, so it gets a chat template.
    """
    return _lines(
        {
            "messages": _messages(sample),
            "max_tokens": sample.output_tokens,
            **({"tools": list(sample.tools)} if sample.tools else {}),
            **sample.sampling,
        }
        for sample in samples
    )


def as_agentic_trace(samples: Sequence[TaskSample], tokenizer: Any) -> str:
    """Return ``--dataset-name agentic-trace``: conversations, turn by turn.

    SGLang feeds the server's own answers back, so a turn holds only what is new and no
    answer. Samples of no session are conversations of one turn.
    """
    sessions: dict[tuple[str, int], list[TaskSample]] = {}
    for number, sample in enumerate(samples):
        alone = 0 if sample.session else number
        sessions.setdefault((sample.session, alone), []).append(sample)
    conversations = []
    for turns in sessions.values():
        conversation: list[dict[str, Any]] = []
        before: list[Message] = []
        for sample in turns:
            messages = _messages(sample)
            goes_on = messages[: len(before)] == before
            new = messages[len(before) if goes_on else 0 :]
            text = prompt_of(tokenizer, sample, messages) or sample.text
            conversation.append(
                {
                    "messages": [each for each in new if each["role"] != "assistant"],
                    "prompt_tokens": len(tokenizer.encode(text)),
                }
            )
            before = messages
        conversations.append(conversation)
    return json.dumps({"conversations": conversations}) + "\n"


def as_custom(samples: Sequence[TaskSample], tokenizer: Any) -> str:
    """Return ``vllm bench serve --dataset-name custom``: a rendered prompt per line.

    To be sent with ``--skip-chat-template --custom-output-len -1``.
    """
    return _lines(
        {
            "prompt": prompt_of(tokenizer, sample, sample.messages) or sample.text,
            "output_tokens": sample.output_tokens,
        }
        for sample in samples
    )


FORMATS: Mapping[str, Callable[[Sequence[TaskSample], Any], str]] = {
    "openai": as_openai,
    "agentic-trace": as_agentic_trace,
    "custom": as_custom,
}
"""By the ``--dataset-name`` of the load generator that reads it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write a workload.

    Args:
        argv: The command line without the program; None takes the process's own.

    Returns:
        Exit status: 0, or 2 for wrong flags or data.
    """
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Write samples of the paper's data sets as a workload for "
        "sglang.bench_serving (openai, agentic-trace) or vllm bench serve (custom).",
        allow_abbrev=False,
    )
    add_options(
        parser,
        {
            **SAMPLING,
            "model": (DEMO_LONG, "folder: its tokenizer and chat template"),
            "seed": (0, "of synthetic samples"),
            "format": (tuple(FORMATS), "the load generator's --dataset-name"),
        },
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        tokenizer = open_tokenizer(options.model)
        found = samples_of(options, tokenizer)
        samples = [sample for each in found.values() for sample in each]
        publish(options.out, FORMATS[options.format](samples, tokenizer))
    except VeriCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(samples)} samples: {options.out}")
    return 0


def _messages(sample: TaskSample) -> list[Message]:
    return list(sample.messages) or [{"role": "user", "content": sample.text}]


def _lines(entries: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(each) + "\n" for each in entries)
