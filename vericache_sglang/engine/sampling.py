"""Plain rows of a mixed forward that need SGLang's sampler, logprobs or a grammar."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def sample_rows(
    batch: ScheduleBatch,
    forward: ForwardBatch,
    logits: torch.Tensor,
    positions: torch.Tensor,
    model_runner: Any,
) -> tuple[torch.Tensor, LogitsProcessorOutput]:
    """Sample one token for every request of a batch with its own parameters.

    The caller uses the result of plain rows only; other rows carry any logits, which
    costs a row of sampling and spares cutting SGLang's sampling state in pieces.

    Args:
        batch: The whole decode batch, unaltered.
        forward: The mixed forward that gave the logits; not modified.
        logits: [requests, vocabulary], one row per request of ``batch``.
        positions: [requests] int64 positions of the tokens that were run.
        model_runner: The target's runner.

    Returns:
        [requests] int64 tokens, and the output that carries log-probabilities.
    """
    whole = copy.copy(forward)
    whole.forward_mode = ForwardMode.DECODE
    whole.positions = positions
    whole.seq_lens = positions + 1
    whole.return_logprob = batch.return_logprob
    whole.top_logprobs_nums = batch.top_logprobs_nums
    whole.token_ids_logprobs = batch.token_ids_logprobs
    whole.sampling_info = batch.sampling_info
    if batch.has_grammar:
        whole.sampling_info.grammars = [req.grammar for req in batch.reqs]
    output = LogitsProcessorOutput(next_token_logits=logits)
    return model_runner.sample(output, whole), output


def one_token_logprobs(output: LogitsProcessorOutput) -> None:
    """Shape [requests] log-probabilities as rows of one token, as spec results are."""
    if output.next_token_logprobs is not None:
        output.next_token_logprobs = output.next_token_logprobs.reshape(-1, 1)
