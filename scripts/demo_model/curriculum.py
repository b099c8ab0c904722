"""Stages of training, and the batches drawn for each.

A sequence is one document and as many turns as fit. Letters: B batch, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from demo_model.tokenizer import encode
from vericache_sglang import demo_records as records

if TYPE_CHECKING:
    import random

    from tokenizers import Tokenizer

RECORD_TOKENS = 29  # an estimate from below: sequences are filled, then cut
FILLER_TOKENS = 14
TURN_TOKENS = 62  # a single-call request with its answer
CALL_TOKENS = 66  # one item of a multi-call request with its part of the answer
SINGLE_SEQUENCES = 0.35  # share of sequences without a multi-call request
SINGLE_TURNS = 0.2  # share of single-call turns in the other sequences
CONTIGUOUS = 0.35  # share of sequences without position gaps


@dataclass(frozen=True, slots=True)
class Stage:
    """What the sequences of one stage look like.

    Attributes:
        length: T, in tokens; longer sequences are cut.
        batch: B, in sequences.
        records: Fewest and most records of a document.
        filler: Largest share of filler lines, in [0, 1).
        positions: Largest position that gaps may reach, in tokens; > ``length``.
        calls: Fewest and most calls of a multi-call request; (1, 1) for none.
        passed: Share of exact answers at which the next stage starts.
    """

    length: int
    batch: int
    records: tuple[int, int]
    filler: float
    positions: int
    calls: tuple[int, int] = (1, 1)
    passed: float = 0.9


SINGLE: tuple[Stage, ...] = (
    Stage(176, 14, (1, 2), 0.0, 256, passed=0.6),
    Stage(320, 8, (1, 5), 0.05, 1024, passed=0.6),
    Stage(640, 4, (4, 12), 0.2, 4096, passed=0.75),
    Stage(1280, 2, (10, 28), 0.3, 10000, passed=0.85),
    Stage(2304, 1, (24, 55), 0.3, 10000),
    Stage(4096, 1, (60, 105), 0.3, 10000, passed=0.95),
)
MULTI: tuple[Stage, ...] = (
    Stage(448, 6, (2, 5), 0.05, 1024, (2, 2), 0.6),
    Stage(768, 4, (4, 10), 0.1, 4096, (2, 4), 0.7),
    Stage(1152, 2, (8, 16), 0.2, 10000, (3, 6), 0.75),
    Stage(1536, 2, (10, 24), 0.3, 20000, (5, 8), 0.8),
    Stage(2560, 1, (24, 55), 0.3, 20000, (5, 8), 0.85),
    Stage(4352, 1, (60, 105), 0.3, 20000, (5, 8), 0.9),
    Stage(8448, 1, (120, 200), 0.3, 20000, (5, 8), 0.9),
    Stage(16640, 1, (200, 400), 0.3, 24000, (5, 8)),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and what to learn from them.

    Attributes:
        ids: [B, T + 1] int64; token t + 1 is the target of token t.
        positions: [B, T] int64.
        answered: [B, T] bool, where the target is part of an answer or ends one.
        labels: [B, T, 5] int64, digits of the current record's id (four) and of the
            current item's number; -100 where there is none.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    answered: torch.Tensor
    labels: torch.Tensor


class BatchMaker:
    """Draws batches; holds the ids of the tokens that structure a conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        (self.newline,), (self.space,) = (encode(tokenizer, c) for c in "\n ")
        (self.quote,), (self.colon,) = (encode(tokenizer, c) for c in ('"', '":'))
        (self.number,), (self.key,) = (encode(tokenizer, c) for c in ("n", "id"))
        (self.dot,), (self.bracket,) = (encode(tokenizer, c) for c in ".[")
        self.user = tokenizer.token_to_id("<|user|>")
        self.assistant = tokenizer.token_to_id("<|assistant|>")
        self.end = tokenizer.token_to_id("<|end|>")
        self.digits = {encode(tokenizer, str(d))[0]: d for d in range(10)}

    def make(self, stage: Stage, rng: random.Random) -> Batch:
        """Draw one batch of ``stage``."""
        ids = torch.zeros(stage.batch, stage.length + 1, dtype=torch.long)
        for row in ids:
            tokens = encode(self.tokenizer, conversation(stage, rng))
            kept = torch.tensor(tokens[: stage.length + 1])
            row[: len(kept)] = kept
        inputs = ids[:, :-1]
        labels = torch.tensor([self.label(row) for row in inputs.tolist()])
        positions = torch.stack(
            [self.spread(row, stage.positions, rng) for row in inputs]
        )
        return Batch(ids, positions, self.inside_answers(inputs), labels)

    def inside_answers(self, ids: torch.Tensor) -> torch.Tensor:
        """Mark, [B, T] bool, tokens from an assistant marker up to before its end."""
        at = torch.arange(ids.shape[1]).expand_as(ids)
        opened = torch.where(ids == self.assistant, at, -1).cummax(1)[0]
        closed = torch.where(ids == self.end, at, -1).cummax(1)[0]
        return opened > closed

    def spread(
        self, row: torch.Tensor, largest: int, rng: random.Random
    ) -> torch.Tensor:
        """Return positions [T] with gaps between lines of the document (PoSE).

        Gaps make positions far beyond T known from sequences of T tokens
        (arXiv:2309.10400).
        """
        positions = torch.arange(len(row))
        if rng.random() < CONTIGUOUS:
            return positions
        room = rng.randint(0, largest - len(row))
        turns = (row == self.user).nonzero()[:, 0].tolist()
        first = turns[0] if turns else len(row)
        breaks = (row[:first] == self.newline).nonzero()[:, 0].tolist()
        chosen = rng.sample(breaks, rng.randint(1, min(6, len(breaks))))
        shares = sorted(rng.random() for _ in chosen)
        before = 0.0
        for place, share in zip(chosen, shares, strict=True):
            positions[place + 1 :] += int((share - before) * room)
            before = share
        return positions

    def label(self, row: list[int]) -> list[list[int]]:
        """Return the probe's targets, [T][5]: see ``Batch.labels``."""
        record, item = [-100] * 4, -100
        labels, in_document = [], True
        for at, token in enumerate(row):
            in_document = in_document and token != self.user
            if token in (self.user, self.assistant):
                item = -100
            if token == self.assistant or (
                in_document and token in (self.newline, self.end)
            ):
                record = [-100] * 4
            if token in self.digits:
                record = self.id_ending(row, at) or record
                item = self.number_at(row, at, item)
            labels.append([*record, item])
        return labels

    def id_ending(self, row: list[int], at: int) -> list[int] | None:
        """Return the four digits of an id whose last one is at ``at``."""
        window = row[max(at - 6, 0) : at + 1]
        if len(window) < 7 or any(token not in self.digits for token in window[3:]):
            return None
        quoted = window[:3] == [self.key, self.colon, self.quote]
        if window[2] != self.space and not quoted:
            return None
        return [self.digits[token] for token in window[3:]]

    def number_at(self, row: list[int], at: int, item: int) -> int:
        """Return the item number that the digit at ``at`` is, else ``item``."""
        before = row[max(at - 2, 0) : at]
        listed = before[-1] in (self.user, self.newline) and row[at + 1 : at + 2] == [
            self.dot
        ]
        if listed or before == [self.number, self.colon]:
            return self.digits[row[at]]
        return item


def conversation(stage: Stage, rng: random.Random) -> str:
    """Draw one document and turns enough to fill ``stage.length`` tokens."""
    filler = rng.random() * stage.filler
    line = RECORD_TOKENS + filler / (1 - filler) * FILLER_TOKENS
    count = rng.randint(*stage.records)
    if stage.records[0] == 1 and rng.random() < 0.3:
        count = 1
    turn = max(TURN_TOKENS, stage.calls[1] * CALL_TOKENS)
    fitting = int((stage.length - min(turn, stage.length // 2)) / line)
    count = max(1, min(count, fitting))
    drawn, text = records.document(rng, count, filler)
    parts = [records.system_turn(text)]
    tokens = count * line
    single = stage.calls[1] == 1 or rng.random() < SINGLE_SEQUENCES
    unasked: list[records.Record] = []
    while tokens < stage.length:
        calls = min(rng.randint(*stage.calls), count)
        if single or rng.random() < SINGLE_TURNS:
            calls = 1
        if len(unasked) < calls:
            unasked = rng.sample(drawn, count)
        asked, unasked = unasked[:calls], unasked[calls:]
        if calls == 1:
            question, answer = records.request(rng, asked[0])
            tokens += TURN_TOKENS
        else:
            question, answer = records.multi_request(rng, asked, calls)
            tokens += calls * CALL_TOKENS
        parts.append(f"{records.user_turn(question)}{answer}<|end|>\n")
    return "".join(parts)
