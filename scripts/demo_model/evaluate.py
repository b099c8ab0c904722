"""Measure exact answers with full KV, by context length and kind of request.

::

    PYTHONPATH=scripts python -m demo_model.evaluate configs/demo-model-long \
        --json scripts/results/demo_model.json

One document is read once; its requests are then answered one by one, each on the
document's keys and values alone. Answers are teacher-forced: greedy decoding gives
the right answer if and only if every argmax after a right prefix is right, so the
exact column is that of greedy decoding. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from demo_model import checkpoint, tokenizer
from vericache_sglang import demo_records as records
from vericache_sglang.provenance import provenance

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from demo_model.net import KeyValues, Net

END = "<|end|>"


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table.

    Attributes:
        context: Asked-for prompt length, in tokens.
        kind: "single" or "multi".
        prompt_tokens: Mean length of document and request, in tokens.
        answer_tokens: Mean length of the right answer with its end, in tokens.
        records: Mean records of a document.
        requests: How many were answered.
        exact: Share answered exactly.
        calls: Calls asked for in all requests.
        calls_exact: Share of calls whose tokens are all right, after a right prefix.
        tokens_right: Share of right answer tokens, after a right prefix.
    """

    context: int
    kind: str
    prompt_tokens: float
    answer_tokens: float
    records: float
    requests: int
    exact: float
    calls: int
    calls_exact: float
    tokens_right: float


@dataclass(frozen=True, slots=True)
class Answered:
    """One answered request: sizes in tokens, and which answer tokens were right."""

    prompt_tokens: int
    records: int
    right: tuple[bool, ...]
    calls: tuple[bool, ...]


class Evaluator:
    """Answers requests with one checkpoint.

    Args:
        folder: Exported checkpoint with its tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self.net: Net = checkpoint.load(folder)
        self.tokenizer: Tokenizer = tokenizer.load(folder)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, special tokens as spelled out."""
        return tokenizer.encode(self.tokenizer, text)

    @torch.inference_mode()
    def read(self, text: str) -> tuple[list[KeyValues], int]:
        """Return the keys and values of ``text``, and its length in tokens."""
        ids = self.encode(text)
        return self.net.hidden(torch.tensor([ids]))[2], len(ids)

    @torch.inference_mode()
    def right_tokens(
        self, past: list[KeyValues], question: str, answer: str
    ) -> tuple[list[int], torch.Tensor]:
        """Return the answer's ids, its end included, and which were right, [A]."""
        asked = self.encode(records.user_turn(question))
        expected = self.encode(answer + END)
        inputs = torch.tensor([asked + expected[:-1]])
        hidden, _, _ = self.net.hidden(inputs, past=past)
        guessed = self.net.logits(hidden[0, len(asked) - 1 :]).argmax(-1)
        return expected, guessed == torch.tensor(expected)

    def answer(
        self, past: list[KeyValues], read: int, held: int, asked: tuple[str, str]
    ) -> Answered:
        """Answer one request on the ``past`` of ``read`` tokens, ``held`` records."""
        expected, right = self.right_tokens(past, *asked)
        question = len(self.encode(records.user_turn(asked[0])))
        calls = call_spans(self.tokenizer, expected)
        return Answered(
            prompt_tokens=read + question,
            records=held,
            right=tuple(right.tolist()),
            calls=tuple(bool(right[a:b].all()) for a, b in calls),
        )


def call_spans(built: Tokenizer, answer: list[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of each call in the ids of an answer."""
    ends = {tokenizer.encode(built, text)[0] for text in ("}}", '"}}')}
    stops = [at + 1 for at, token in enumerate(answer) if token in ends]
    return list(zip([0, *stops], stops, strict=False))


def measure(
    evaluator: Evaluator, context: int, documents: int, requests: int, seed: int
) -> list[Result]:
    """Measure one context length.

    Args:
        context: Prompt length, in tokens, met from below.
        documents: How many documents.
        requests: Per document, single-call ones and again multi-call ones.
        seed: Of documents and requests.

    Returns:
        The row of single-call requests, then that of 5 to 8 calls at once.
    """
    answered: dict[str, list[Answered]] = {"single": [], "multi": []}
    for number in range(documents):
        rng = random.Random(f"{seed}/{context}/{number}")
        prompt = records.prompt_of_length(
            rng, context, lambda text: len(evaluator.encode(text)), calls=8
        )
        past, read = evaluator.read(records.system_turn(prompt.document))
        held = len(prompt.records)
        for _ in range(requests):
            asked = records.request(rng, rng.choice(prompt.records))
            answered["single"].append(evaluator.answer(past, read, held, asked))
            calls = rng.randint(5, 8)
            asked = records.multi_request(rng, prompt.records, calls)
            answered["multi"].append(evaluator.answer(past, read, held, asked))
    return [summary(context, kind, rows) for kind, rows in answered.items()]


def summary(context: int, kind: str, rows: list[Answered]) -> Result:
    """Reduce answered requests to one row."""
    tokens = [right for row in rows for right in row.right]
    calls = [right for row in rows for right in row.calls]
    return Result(
        context=context,
        kind=kind,
        prompt_tokens=round(sum(row.prompt_tokens for row in rows) / len(rows), 1),
        answer_tokens=round(len(tokens) / len(rows), 1),
        records=round(sum(row.records for row in rows) / len(rows), 1),
        requests=len(rows),
        exact=round(sum(all(row.right) for row in rows) / len(rows), 4),
        calls=len(calls),
        calls_exact=round(sum(calls) / len(calls), 4),
        tokens_right=round(sum(tokens) / len(tokens), 5),
    )


def table(results: list[Result]) -> str:
    """Return the results as a Markdown table."""
    names = list(Result.__dataclass_fields__)
    rows = [names, ["---"] * len(names)]
    rows += [[str(value) for value in asdict(result).values()] for result in results]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(argv: list[str]) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 4096, 8192, 16384]
    )
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--requests", type=int, default=5, help="per document and kind")
    parser.add_argument("--seed", type=int, default=71)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    evaluator, begun, results = Evaluator(given.checkpoint), time.time(), []
    for context in given.contexts:
        results += measure(
            evaluator, context, given.documents, given.requests, given.seed
        )
        print(f"{context} tokens: {time.time() - begun:.0f} s", file=sys.stderr)
    print(table(results))
    if given.json:
        content = {
            **provenance(argv, "python -m demo_model.evaluate"),
            "seconds": round(time.time() - begun),
            "results": [asdict(result) for result in results],
        }
        given.json.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_json(given.json, content)


if __name__ == "__main__":
    main(sys.argv[1:])
