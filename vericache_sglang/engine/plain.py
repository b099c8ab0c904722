"""A batch in which every request decodes one token on its full KV, as SGLang does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.engine.sampling.logprobs import one_token_logprobs
from vericache_sglang.engine.sampling.profile import Rule

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from vericache_sglang.engine.state import RequestState


def samples_as_sglang(states: list[RequestState], info: SamplingBatchInfo) -> bool:
    """Say whether SGLang's batch-wide sampling is right for every request.

    It counts one token per step for penalties, which is wrong after a verification;
    and in a batch of several kinds a seed gives other tokens than alone (``Group``).
    The batch's flags outlive the request that set them, so they are looked at too.

    Args:
        states: The batch's requests.
        info: The batch's sampling state.
    """
    if any(state.penalties and state.figures.rounds for state in states):
        return False
    kinds = {(state.profile.rule, state.profile.filtered) for state in states}
    if all(rule is not Rule.SEEDED for rule, _ in kinds):
        return True
    cut = info.need_top_p_sampling or info.need_top_k_sampling
    return kinds == {(Rule.SEEDED, bool(cut or info.need_min_p_sampling))}


def run_plain(
    batch: ScheduleBatch, states: list[RequestState], target_worker: Any
) -> GenerationBatchResult:
    """Decode one token of every request exactly as SGLang does without VeriCache.

    Args:
        batch: The decode batch; altered as SGLang's own preparation would.
        states: Its requests, in order; their tokens are recorded.
        target_worker: SGLang's ``TpModelWorker``.
    """
    device = batch.device
    batch.input_ids = torch.tensor(
        [state.pending for state in states], dtype=torch.int64, device=device
    )
    # What we published as lengths is what the scheduler hands back.
    table = batch.req_to_token_pool.req_to_token
    slots = table[batch.req_pool_indices, batch.seq_lens]
    batch.out_cache_loc = slots.to(torch.int64)
    batch.seq_lens = batch.seq_lens + 1
    batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    batch.seq_lens_sum = None
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.spec_info = None
    result = target_worker.forward_batch_generation(batch)
    for state, token in zip(states, result.next_token_ids.tolist(), strict=True):
        state.accept([token])
    one_token_logprobs(result.logits_output)
    result.accept_lens = torch.ones(len(states), dtype=torch.int32, device=device)
    result.new_seq_lens = batch.seq_lens
    result.speculative_output_stride = 1
    result.num_non_draft_tokens_per_req = 1
    return result
