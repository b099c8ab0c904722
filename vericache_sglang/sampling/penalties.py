"""Frequency, presence and repetition penalties and ``min_new_tokens`` of one request.

SGLang keeps penalties per batch, adds one token per decode step and cannot remove a
token. Drafts may be rejected, so here the state is per request and counts verified
tokens only. The arithmetic is that of ``sampling/penaltylib``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vericache_sglang.device.upload import upload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class PenaltyRows(NamedTuple):
    """Penalties of n positions of one request.

    Attributes:
        additive: [n, V] float32, added to the logits.
        scaling: [n, V] float32 or None; positive logits are divided by it, negative
            ones multiplied.
    """

    additive: torch.Tensor
    scaling: torch.Tensor | None


class Penalties:
    """One request's penalties over its verified output.

    Under overlap SGLang counts with one step of delay: it prepares a step before the
    last token is known, so it counts the input's last token first and never the newest
    output token (``ScheduleBatch.cumulate_penalty_output_tokens``). ``lagged``
    reproduces this for a request alone in its batch.

    Args:
        params: SGLang's ``SamplingParams``.
        stops: Tokens that ``min_new_tokens`` forbids.
        vocab_size: V, width of the logits.
        device: Device of the logits.
        lagged: The input's last token under overlap; None counts without delay.
    """

    def __init__(
        self,
        params: Any,
        stops: Iterable[int],
        vocab_size: int,
        device: Any,
        lagged: int | None,
    ) -> None:
        self._frequency_step = float(params.frequency_penalty or 0.0)
        self._presence_step = float(params.presence_penalty or 0.0)
        repetition = params.repetition_penalty
        self._repetition_step = 1.0 if repetition is None else float(repetition)
        self._least_tokens = int(params.min_new_tokens or 0)
        zeros = torch.zeros(vocab_size, device=device)
        self._frequency, self._presence = zeros, zeros.clone()
        self._repetition = torch.ones(vocab_size, device=device)
        self._forbidden = zeros.clone()
        (ends,) = upload(device, [token for token in stops if token < vocab_size])
        self._forbidden[ends] = -torch.inf
        self._uncounted = [] if lagged is None else [lagged]

    def note(self, tokens: Sequence[int]) -> None:
        """Count verified output tokens, in order."""
        queue = [*self._uncounted, *tokens]
        late = len(self._uncounted)
        for token in queue[: len(queue) - late]:
            self._count(token, self._frequency, self._presence, self._repetition)
        self._uncounted = queue[len(queue) - late :]

    def rows(self, emitted: int, drafts: Sequence[int], first: int) -> PenaltyRows:
        """Return the penalties of the positions after ``drafts[:first]``, one by one.

        Args:
            emitted: Number of verified output tokens.
            drafts: d drafted tokens.
            first: Number of drafts before the first position, in [0, d].

        Returns:
            d + 1 - first rows; the last is for the position after all drafts.
        """
        ahead = [*self._uncounted, *drafts]
        frequency, presence = self._frequency.clone(), self._presence.clone()
        repetition = self._repetition.clone()
        for token in ahead[:first]:
            self._count(token, frequency, presence, repetition)
        additive, scaling = [], []
        for j in range(first, len(drafts) + 1):
            if j > first:
                self._count(ahead[j - 1], frequency, presence, repetition)
            row = -frequency - presence
            if emitted + j < self._least_tokens:
                row += self._forbidden
            additive.append(row)
            scaling.append(repetition.clone())
        scaled = self._repetition_step != 1.0
        return PenaltyRows(
            torch.stack(additive), torch.stack(scaling) if scaled else None
        )

    def _count(
        self,
        token: int,
        frequency: torch.Tensor,
        presence: torch.Tensor,
        repetition: torch.Tensor,
    ) -> None:
        # ``presence[token] = number`` copies from the host and synchronises on a GPU.
        frequency[token].add_(self._frequency_step)
        presence[token].fill_(self._presence_step)
        repetition[token].fill_(self._repetition_step)
