"""Log-probabilities of emitted tokens under full KV, in SGLang's result layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position.

    Attributes:
        value: Log-probability of the sampled token.
        top: Values and token ids of the most probable tokens; None if not requested.
        chosen: Values and token ids of the requested tokens; None if not requested.
    """

    value: float
    top: tuple[Any, Any] | None = None
    chosen: tuple[Any, Any] | None = None


def read(output: LogitsProcessorOutput) -> list[TokenLogprob]:
    """Return the log-probabilities in ``output`` from SGLang's sampler, by row."""
    values = output.next_token_logprobs.tolist()

    def pairs(numbers: Any, tokens: Any) -> list[tuple[Any, Any] | None]:
        if not numbers:
            return [None] * len(values)
        return list(zip(numbers, tokens, strict=True))

    top = pairs(output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx)
    chosen = pairs(
        output.next_token_token_ids_logprobs_val,
        output.next_token_token_ids_logprobs_idx,
    )
    return [TokenLogprob(*entry) for entry in zip(values, top, chosen, strict=True)]


@dataclass(slots=True)
class LogprobTable:
    """Collects the log-probabilities of one iteration.

    Attributes:
        rows: Batch index -> one entry per emitted token.
    """

    rows: dict[int, Sequence[TokenLogprob]] = field(default_factory=dict)

    def pack(self, batch_indices: int) -> LogitsProcessorOutput:
        """Return the entries in the layout that ``_apply_decode_logprobs`` reads.

        Args:
            batch_indices: B, requests of the batch.

        Returns:
            Log-probabilities [B, w] and lists of B * w entries, w >= 1.
        """
        width = max((len(row) for row in self.rows.values()), default=0) or 1
        values = torch.zeros(batch_indices, width)
        no_top = (torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        top = [no_top] * (batch_indices * width)
        not_chosen: tuple[Any, Any] = (torch.zeros(0), [])
        chosen = [not_chosen] * (batch_indices * width)
        for batch_index, row in self.rows.items():
            for j, entry in enumerate(row):
                values[batch_index, j] = entry.value
                top[batch_index * width + j] = entry.top or no_top
                chosen[batch_index * width + j] = entry.chosen or not_chosen
        return LogitsProcessorOutput(
            next_token_logits=None,
            next_token_logprobs=values,
            next_token_top_logprobs_val=[entry[0] for entry in top],
            next_token_top_logprobs_idx=[entry[1] for entry in top],
            next_token_token_ids_logprobs_val=[entry[0] for entry in chosen],
            next_token_token_ids_logprobs_idx=[entry[1] for entry in chosen],
        )


def one_token_logprobs(output: LogitsProcessorOutput) -> None:
    """Reshape [requests] log-probabilities to rows of one token, as in spec results."""
    if output.next_token_logprobs is not None:
        output.next_token_logprobs = output.next_token_logprobs.reshape(-1, 1)
