"""Measures how many draft tokens a verification accepts, without running a server.

Draft-verify cycles are replayed on a known greedy answer. Accepted draft tokens are the
answer's own tokens, so one forward over those tokens on the approximate cache drafts a
whole cycle. The cycle ends where its argmax first differs from the answer; later tokens
are never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vericache_sglang.calibrate.cache import KV, RoundedCache
from vericache_sglang.compression.codecs.rotatekv import massive_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.calibrate.subject import Subject


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One prompt, its KV and its greedy answer, all on the full KV.

    Attributes:
        prompt: T, length of the prompt in tokens.
        answer: Token ids, n >= 1; the last one ends the answer, or the run.
        layers: Every layer's KV, [H, T + n - 1, D] in the dtype of the pool: the model
            never runs the last token of an answer.
        sinks: Every layer's slots of massive activations (RotateKV), ascending; empty
            unless they were requested.
    """

    prompt: int
    answer: tuple[int, ...]
    layers: tuple[KV, ...]
    sinks: tuple[torch.Tensor, ...] = ()

    def prompt_kv(self) -> list[KV]:
        """Return the KV of the prompt, [H, T, D]."""
        return [kv.tokens(0, self.prompt) for kv in self.layers]

    def answer_kv(self, tokens: int) -> list[KV]:
        """Return the KV of the answer's first tokens."""
        return [kv.tokens(self.prompt, self.prompt + tokens) for kv in self.layers]


@dataclass(frozen=True, slots=True)
class Cycles:
    """Acceptance counts of the draft-verify cycles of one or many answers.

    Attributes:
        cycles: Draft-verify cycles, one verification each.
        drafted: Tokens drafted; the last cycle of an answer drafts the tokens left.
        accepted: Draft tokens accepted, without the bonus token.
    """

    cycles: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Cycles) -> Cycles:
        return Cycles(
            self.cycles + other.cycles,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )

    @property
    def mean(self) -> float:
        """Mean acceptance length of a cycle, in tokens, without the bonus token."""
        return self.accepted / self.cycles if self.cycles else 0.0


@torch.inference_mode()
def read(
    subject: Subject,
    prompt: Sequence[int],
    most: int,
    dtype: torch.dtype,
    *,
    sinks: bool = False,
) -> Reading:
    """Run a prompt and answer it greedily.

    Args:
        prompt: Token ids, at least one.
        most: Maximum tokens of the answer, >= 1; the model may end it earlier.
        dtype: Dtype of the KV pool.
        sinks: Find massive activations; holds the inputs of all layers meanwhile.
    """
    cache = RoundedCache(dtype)
    output = subject.run(prompt, cache, last=1, output_hidden_states=sinks)
    found = []
    if sinks:
        inputs = output.hidden_states[: len(cache.layers)]
        found = [massive_slots(hidden[0].float()).cpu() for hidden in inputs]
    answer = [int(output.logits[0, -1].argmax())]
    while len(answer) < most and answer[-1] not in subject.ends:
        output = subject.run(answer[-1:], cache, last=1)
        answer.append(int(output.logits[0, -1].argmax()))
    return Reading(len(prompt), tuple(answer), tuple(cache.exact()), tuple(found))


@torch.inference_mode()
def replay(
    subject: Subject, reading: Reading, draft: Sequence[KV], length: int
) -> Cycles:
    """Draft and verify an answer on an approximate prompt.

    A draft-verify cycle starts at the last verified token, whose own KV the draft
    forward computes: answer tokens before it have exact KV, drafted ones the KV of the
    draft forward. The prefill emits the first token of the answer. A cycle that accepts
    r tokens advances by r + 1, because the verification adds a bonus token.

    Args:
        subject: The model that made ``reading``.
        reading: Prompt and answer on the full KV.
        draft: Every layer's approximate KV of the prompt, [H, T, D].
        length: Draft length, tokens per cycle, >= 1.
    """
    dtype, like = reading.layers[0].keys.dtype, subject.like
    answer = reading.answer
    cache = RoundedCache(dtype, draft, like)
    cycles, begin = Cycles(), 1
    while begin < len(answer):
        drafted = min(length, len(answer) - begin)
        cache.crop(reading.prompt)
        cache.append(reading.answer_kv(begin - 1), like)
        output = subject.run(answer[begin - 1 : begin + drafted - 1], cache)
        guessed = output.logits[0].argmax(-1).tolist()
        accepted = agreeing(guessed, answer[begin : begin + drafted])
        cycles += Cycles(1, drafted, accepted)
        begin += accepted + 1
    return cycles


def agreeing(guessed: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the length of the common prefix, in tokens."""
    for place, (guess, want) in enumerate(zip(guessed, wanted, strict=True)):
        if guess != want:
            return place
    return len(wanted)


def perfect(reading: Reading, length: int) -> Cycles:
    """Return the draft-verify cycles of an answer whose draft tokens all pass."""
    left, cycles = len(reading.answer) - 1, Cycles()
    while left > 0:
        drafted = min(length, left)
        cycles += Cycles(1, drafted, drafted)
        left -= drafted + 1
    return cycles
