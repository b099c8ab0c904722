"""Autoregressive decoding: every request of a batch decodes one token on full KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_sglang.runtime.in_flight import InFlightForward
from vericache_sglang.sampling.logprobs import one_token_logprobs
from vericache_sglang.sampling.profile import SamplingRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
    from vericache_sglang.runtime.result_recorder import ResultRecorder


def samples_as_sglang(states: list[RequestState], info: SamplingBatchInfo) -> bool:
    """Return whether SGLang's batch-wide sampling is correct for every request.

    For penalties it counts the last token in every step, also in those that drafted or
    waited, and under overlap a custom processor sees all tokens but those of the last
    step, so both are wrong for a request that was ever compressed, and after proposals.
    After a retraction the output so far is not counted, and under overlap the first
    token of another server's prefill is counted twice.
    In a batch of mixed sampling kinds a seed yields different tokens than alone
    (``Group``). The batch's flags outlive the request that set them, so they are
    checked too.

    Args:
        states: The batch's requests.
        info: The batch's sampling state.
    """
    for state in states:
        looks_back = state.penalties or state.req.custom_logit_processor is not None
        if looks_back and not _one_token_a_step(state):
            return False
    kinds = {(state.profile.rule, state.profile.filtered) for state in states}
    if all(rule is not SamplingRule.SEEDED for rule, _ in kinds):
        return True
    cut = info.need_top_p_sampling or info.need_top_k_sampling
    return kinds == {(SamplingRule.SEEDED, bool(cut or info.need_min_p_sampling))}


def _one_token_a_step(state: RequestState) -> bool:
    """Return whether every step so far, from the first token on, emitted one token."""
    req = state.req
    return not (
        state.parts is not None
        or state.stats.inner_proposed
        or state.prompt > len(req.origin_input_ids)
        or req.bootstrap_room is not None
    )


def run_plain(
    batch: ScheduleBatch,
    states: list[RequestState],
    draft_tokens: DraftTokenBuffer,
    recorder: ResultRecorder,
    forward: Callable[[ScheduleBatch], GenerationBatchResult],
) -> InFlightForward:
    """Decode one token of every request exactly as SGLang does without VeriCache.

    Args:
        batch: The decode batch; modified as SGLang's own preparation would.
        states: Its requests, in batch order.
        draft_tokens: Provides the pending tokens and receives the new ones.
        recorder: Records the launch of every row.
        forward: Runs the prepared batch.
    """
    requests = batch.req_pool_indices.to(torch.int64)
    batch.input_ids = draft_tokens.pending(requests)
    # The scheduler passes back the lengths that we published.
    table = batch.req_to_token_pool.req_to_token
    batch.out_cache_loc = table[requests, batch.seq_lens].to(torch.int64)
    batch.seq_lens = batch.seq_lens + 1
    batch.seq_lens_cpu = _host_lengths(batch.seq_lens, states)
    batch.seq_lens_sum = None
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.spec_info = None
    result = forward(batch)
    draft_tokens.start(requests, result.next_token_ids, batch.seq_lens)
    one_token_logprobs(result.logits_output)
    result.accept_lens = torch.ones(len(states), dtype=torch.int32, device=batch.device)
    result.new_seq_lens = batch.seq_lens
    result.speculative_output_stride = 1
    result.num_non_draft_tokens_per_req = 1
    launched = [recorder.launch(state, i) for i, state in enumerate(states)]
    return InFlightForward(result, 1, launched)


def _host_lengths(lengths: torch.Tensor, states: list[RequestState]) -> torch.Tensor:
    """Return the rows' lengths on the host; upper bounds if exact ones would wait."""
    if lengths.device.type == "cpu":
        return lengths
    return torch.tensor([state.row_length + state.pending_max + 1 for state in states])
