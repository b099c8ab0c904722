"""The speculative worker SGLang calls: plans, prepares, runs one forward, accepts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from vericache_sglang.engine.eligibility import draftable, stop_tokens
from vericache_sglang.engine.mixed import MixedForward
from vericache_sglang.engine.query_tails import attention_layers
from vericache_sglang.engine.residence import Residence
from vericache_sglang.engine.sampling import one_token_logprobs
from vericache_sglang.engine.spec_input import VeriCacheSpecInput
from vericache_sglang.engine.state import RequestState
from vericache_sglang.scheduling.plan import Limits, Plain, Plan
from vericache_sglang.scheduling.stagger import first_target, plan_iteration

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

    from vericache_sglang.config.schema import VeriCacheConfig

MAX_SPLITS = 2
"""Prompts split in one iteration: a split costs about one pass over the prompt's KV."""

PLAIN_ROOM = 3
"""Slots a plain row uses before the next allocation: a late token and two more."""


class VeriCacheWorker(BaseSpecWorker):
    """See ``BaseSpecWorker``; target and drafter are the same model runner.

    Owns the truth about every decoding request (``RequestState``). Per iteration: poll
    reloads, plan, start reloads, one forward, accept, split. SGLang's scheduler sees
    rows as long as the table says and accept lengths between 0 (drafting or waiting)
    and d + 1 (verified).

    Args:
        config: Frozen settings.
        server_args: SGLang's arguments.
        gpu_id: Device index; unused, the target worker has the device.
        nccl_port: Unused, there is no second process group.
        target_worker: SGLang's ``TpModelWorker``.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: Any,
    ) -> None:
        super().__init__()
        self._config = config
        self._target_worker = target_worker
        self._draft_worker = None
        self.model_runner = target_worker.model_runner
        self.device = self.model_runner.device
        self._overlap = not server_args.disable_overlap_schedule
        self._states: dict[str, RequestState] = {}
        self._newcomers = 0
        self._seconds = 0.0

    @property
    def draft_worker(self) -> None:
        """No second worker: drafts come from the target's own draft part."""
        return None

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """See ``BaseSpecWorker``; runs before attention backends read the row table."""
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.residence = Residence(
            self._config,
            req_to_token_pool,
            token_to_kv_pool_allocator,
            attention_layers(self.model_runner.model)[0].tp_q_head_num,
        )
        self._mixed = MixedForward(self._config, self.residence, self._target_worker)
        # Called by the hook on ReqToTokenPool.free (patches: mem_cache_memory_pool).
        req_to_token_pool.vericache_on_free = self.release

    def init_attention_backends(self) -> None:
        """See ``BaseSpecWorker``; from here on the layers report their queries."""
        self.residence.query_tails.watch(self.model_runner.model)

    # -- called by the scheduler ------------------------------------------------

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run one iteration of SGLang's batch; see the class."""
        if batch.forward_mode.is_decode():
            result = self._decode(batch)
        else:
            result = self._prefill(batch)
        result.next_draft_input = VeriCacheSpecInput(len(batch.reqs))
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def prepare_for_kv_cache_release(self, req: Req) -> None:
        """Make a finished request's row whole for the prefix tree, if there is room.

        Looked up by name in ``batch_result_processor.py``, right before the release.
        """
        state = self._states.get(req.rid)
        if state is not None and state.parts is not None and not state.broken:
            self.residence.join(state, self._tree_cache)

    def release(self, req: Req) -> None:
        """Forget a request whose row SGLang frees: finished, aborted or retracted."""
        self.residence.query_tails.forget(req.rid)
        state = self._states.pop(req.rid, None)
        if state is None:
            return
        if state.parts is not None:
            # A retracted request prefills again and is an ordinary one until split.
            req.skip_radix_cache_insert = not state.parts.insertable
        self.residence.release(state)
        self.residence.check(self._states)

    def clear_cache_pool(self) -> None:
        """Forget everything; SGLang has flushed its caches and nothing runs."""
        for state in list(self._states.values()):
            self.release(state.req)

    def report(self) -> dict[str, int | float]:
        """Return counters and what is held now, for ``GET /get_server_info``."""
        return {**self.residence.report(), "running": len(self._states)}

    # -- prefill ----------------------------------------------------------------

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        self._tree_cache = batch.tree_cache
        # Read by the hook on the tree (patches: mem_cache_unified_radix_cache).
        tail = self.residence.query_tails.width
        self._tree_cache.vericache_reprefill_tail = tail
        result = self._target_worker.forward_batch_generation(batch)
        if not batch.is_prefill_only and batch.reqs:
            tokens = result.next_token_ids.tolist()
            lengths = batch.seq_lens_cpu.tolist()
            for req, token, length in zip(batch.reqs, tokens, lengths, strict=True):
                # A middle chunk's state is overwritten by the next chunk's.
                state = self._states[req.rid] = self._new_state(req, token, length)
                whole = length >= len(req.origin_input_ids) + len(req.output_ids)
                if whole and not state.eligible:  # nobody will read its queries
                    self.residence.query_tails.forget(req.rid)
        result.accept_lens = torch.ones(
            len(batch.reqs), dtype=torch.int32, device=self.device
        )
        result.new_seq_lens = batch.seq_lens
        result.speculative_num_draft_tokens = self._config.draft_length + 1
        return result

    def _new_state(self, req: Req, token: int, length: int) -> RequestState:
        greedy = draftable(req)
        req.vericache_room = PLAIN_ROOM
        return RequestState(
            req=req,
            prompt=length,
            verified=length,
            pending=token,
            emitted=len(req.output_ids) + 1,
            greedy=greedy,
            eligible=greedy and self.residence.splitter.budget(length) is not None,
            stops=stop_tokens(req),
        )

    # -- one decode iteration ---------------------------------------------------

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        began = time.perf_counter()
        self.residence.counters.note_iteration(len(batch.reqs))
        # A batch with a grammar processes the last result between choosing the batch
        # and running it, so a request may have ended, and lost its row, already.
        seats = {
            i: self._states[req.rid]
            for i, req in enumerate(batch.reqs)
            if req.rid in self._states
        }
        states = list(seats.values())
        all_here = len(states) == len(batch.reqs)
        if all_here and not any(state.parts or state.eligible for state in states):
            # Nothing to plan and nothing to draft: no slower than plain SGLang.
            return self._run_plain(batch, states)
        self._abort_broken(states)
        plan = self._plan(states)
        for stage_in in plan.stage_ins:
            self.residence.reloads.start(self._states[stage_in.rid])
        if all_here and all(isinstance(action, Plain) for action in plan.rows):
            result = self._run_plain(batch, states)
        else:
            result = self._mixed.run(batch, seats, plan)
        self._split(plan, batch.tree_cache)
        for state in states:
            state.launches += 1
        drafting = sum(state.parts is not None for state in states)
        self.residence.counters.peak_drafting = max(
            self.residence.counters.peak_drafting, drafting
        )
        lengths = torch.ones(len(batch.reqs), dtype=torch.int64)
        for i, state in seats.items():
            lengths[i] = state.row_length
        result.new_seq_lens = lengths.to(self.device)
        elapsed = time.perf_counter() - began
        self._seconds = (
            0.8 * self._seconds + 0.2 * elapsed if self._seconds else elapsed
        )
        return result

    def _abort_broken(self, states: list[RequestState]) -> None:
        for rid in self.residence.reloads.poll(states):
            state = self._states[rid]
            self.residence.reloads.end(state)
            state.broken = True
            state.req.to_finish = FINISH_ABORT(
                "VeriCache: the host copy of this request's KV is damaged"
            )

    def _plan(self, states: list[RequestState]) -> Plan:
        config, reloads = self._config, self.residence.reloads
        # Under overlap the prefill's result (the tree insertion) is processed only
        # after the first decode was launched.
        settled = 1 if self._overlap else 0
        longest = max((s.parts.budget.dropped for s in states if s.parts), default=0)
        views = [
            state.view(
                config.draft_length,
                splittable=state.eligible
                and state.parts is None
                and state.launches >= settled
                and state.remaining > 1,
            )
            for state in states
        ]
        limits = Limits(
            max_verifies=config.max_verifies,
            max_splits=MAX_SPLITS,
            staging_spans=reloads.region.free_spans(),
            lead=reloads.lead(longest, self._seconds, config.draft_length),
        )
        return plan_iteration(views, limits)

    def _split(self, plan: Plan, tree_cache: Any) -> None:
        if not plan.splits:
            return
        drafting = sum(state.parts is not None for state in self._states.values())
        for split in plan.splits:
            state = self._states[split.rid]
            if not self.residence.split(state, tree_cache):
                continue
            drafting += 1
            # One round may be committed late (overlap), the next one is written.
            state.req.vericache_room = 2 * (self._config.draft_length + 1)
            state.target = first_target(
                self._newcomers, drafting, self._config.draft_length
            )
            self._newcomers += 1

    def _run_plain(
        self, batch: ScheduleBatch, states: list[RequestState]
    ) -> GenerationBatchResult:
        """Decode a batch of plain rows exactly as SGLang does without VeriCache."""
        batch.input_ids = torch.tensor(
            [state.pending for state in states], dtype=torch.int64, device=self.device
        )
        # What we published as lengths is what the scheduler hands back.
        table = self.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices, batch.seq_lens]
        batch.out_cache_loc = slots.to(torch.int64)
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum = None
        batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
        batch.spec_info = None
        result = self._target_worker.forward_batch_generation(batch)
        for state, token in zip(states, result.next_token_ids.tolist(), strict=True):
            state.accept([token], self._config.draft_length)
        one_token_logprobs(result.logits_output)
        result.accept_lens = torch.ones(
            len(states), dtype=torch.int32, device=self.device
        )
        result.new_seq_lens = batch.seq_lens
        result.speculative_output_stride = 1
        result.num_non_draft_tokens_per_req = 1
        self.residence.counters.plain_rows += len(states)
        return result
