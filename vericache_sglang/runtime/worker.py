"""The speculative worker that SGLang calls: prefill, decode and release."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from zmq import POLLIN

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.drafters.catalog import open_drafter
from vericache_sglang.drafters.features import Features
from vericache_sglang.drafters.model import ring_of
from vericache_sglang.drafters.texts import Texts
from vericache_sglang.former_names import with_former_names
from vericache_sglang.kv.calibration import starting_coefficients
from vericache_sglang.kv.query_tails import attention_layers
from vericache_sglang.observability.consistency_check import is_replay
from vericache_sglang.observability.counters import Totals
from vericache_sglang.observability.guard import Guard
from vericache_sglang.observability.iteration_reporter import IterationReporter
from vericache_sglang.observability.sinks import open_sinks
from vericache_sglang.runtime.admission import RequestAdmission
from vericache_sglang.runtime.arrival import RequestStateFactory
from vericache_sglang.runtime.control_requests import ControlGate
from vericache_sglang.runtime.departure import keep_last_token
from vericache_sglang.runtime.draft_model import WEIGHTED, DraftHead
from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
from vericache_sglang.runtime.forward.graphs import eager_reasons, graph_figures
from vericache_sglang.runtime.forward.mixed import MixedForward
from vericache_sglang.runtime.forward.proposals import InnerProposer, PromptChunk
from vericache_sglang.runtime.forward.spec_input import (
    VeriCacheSpecInput,
    hidden_mode,
    take_hidden,
)
from vericache_sglang.runtime.in_flight import (
    InFlightForward,
    InFlightQueue,
    PendingRow,
)
from vericache_sglang.runtime.iteration import Decoding
from vericache_sglang.runtime.known_tokens import put_known
from vericache_sglang.runtime.model_services import ModelServices
from vericache_sglang.runtime.paired import open_starts
from vericache_sglang.runtime.placement import KVPlacement
from vericache_sglang.runtime.probing import Probing
from vericache_sglang.runtime.recovery import Recovery
from vericache_sglang.runtime.remote_role import STANDALONE, open_role
from vericache_sglang.runtime.remote_rows import rows_of
from vericache_sglang.runtime.result_recorder import ResultRecorder
from vericache_sglang.runtime.scheduler_settings import runtime_settings
from vericache_sglang.runtime.tp_sync import open_tp_sync
from vericache_sglang.scheduling.estimates import Estimates
from vericache_sglang.scheduling.iteration_model import IterationModel
from vericache_sglang.scheduling.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.request import RequestState


class VeriCacheWorker(BaseSpecWorker):
    """See ``BaseSpecWorker``; target and drafter are the same model runner.

    Owns the state of every decoding request (``RequestState``) as reported to the host;
    unreported tokens are in the draft token buffer. SGLang's scheduler sees row lengths
    as in the block table and accept lengths from 0 (drafting or waiting) to d + 1
    (verified).

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
        self._server_args = server_args
        self._target_worker = target_worker
        self._draft_worker = None
        self.model_runner = target_worker.model_runner
        self.device = self.model_runner.device
        # Loaded before SGLang sizes the KV pool by the memory that is left.
        kind = WEIGHTED.get(config.inner)
        self._draft_model = kind(server_args, target_worker) if kind else None
        self._overlap = not server_args.disable_overlap_schedule
        self._state_factory = RequestStateFactory(
            config,
            self.model_runner.model_config.vocab_size,
            self.device,
            overlap=self._overlap,
            deterministic=server_args.enable_deterministic_inference,
        )
        self._states: dict[str, RequestState] = {}
        self._guard = Guard()
        self._totals = Totals()
        # Called by the hook on the scheduler (patches: managers_scheduler).
        self.control_gate = ControlGate(self._new_weights)

    @property
    def draft_worker(self) -> None:
        """None: the target model drafts on its own draft KV."""
        return None

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """See ``BaseSpecWorker``; runs before attention backends are created."""
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        pool = token_to_kv_pool_allocator.get_kvcache()
        layers = attention_layers(self.model_runner.model)
        start = starting_coefficients(pool, layers, self._config.draft_length)
        self._measured = Estimates(iteration=IterationModel(start))
        tp_size = self._server_args.tp_size
        self._tp_sync = open_tp_sync(self._measured, tp_size)
        services = ModelServices(self.model_runner, self._server_args)
        compressor = create_compressor(self._config.compressor, self._config.seed)
        compressor = compressor.bind(services)
        self.placement = KVPlacement(
            self._config,
            self._tp_sync,
            req_to_token_pool,
            token_to_kv_pool_allocator,
            compressor,
            self.model_runner,
        )
        strict = envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get() > 0
        self.placement.segments.strict = strict
        vocabulary = self.model_runner.model_config.vocab_size
        self.placement.guard.vocabulary = vocabulary
        self.role = open_role(
            self._config, self._server_args, self.placement, vocabulary
        )
        self._tp_sync.sync_inputs(self.placement.host_slots, ())
        self.runtime = Runtime(
            runtime_settings(
                self._config,
                self.placement,
                deterministic=self._server_args.enable_deterministic_inference,
            ),
            self._tp_sync.estimates,
        )
        self._recovery = Recovery(
            self._states,
            self.runtime,
            self.placement,
            self._tp_sync,
            strict=strict,
        )
        self.placement.segments.failed = self._recovery.all_lost
        probing = Probing(
            compressor.selector,
            self.placement.observer,
            self.placement.handles,
            self.model_runner,
            self.placement.verify_rows[0],
            self._tp_sync,
        )
        self._request_admission = RequestAdmission(
            *(self.placement, probing, self.runtime, self._tp_sync),
            overlap=self._overlap,
        )
        leads = self._tp_sync.leads
        sinks = open_sinks(self._config, self._figures) if leads else {}
        self._reporter = IterationReporter(
            self.runtime, self.placement.link_log, sinks, self._guard
        )
        atexit.register(self._reporter.close)
        atexit.register(self.placement.close)
        self._open_draft_tokens(req_to_token_pool.shape.requests)
        recorder = ResultRecorder(self.placement, self.runtime, self._states)
        self._in_flight = InFlightQueue(recorder.record, self._reporter.recorded)
        mixed = MixedForward(
            self.placement,
            self._target_worker,
            self._draft_tokens,
            self._in_flight,
            recorder,
            overlap=self._overlap,
        )
        # Called by the hook on the scheduler (patches: managers_scheduler_queue).
        self.early_starts = open_starts(
            self._config,
            self.placement,
            self._draft_tokens,
            self._would_draft,
            self._arrive,
        )
        if self.early_starts is not None:
            mixed.extend = probing.extend
        self._decoding = Decoding(
            states=self._states,
            target_worker=self._target_worker,
            placement=self.placement,
            runtime=self.runtime,
            tp_sync=self._tp_sync,
            overlap=self._overlap,
            request_admission=self._request_admission,
            mixed=mixed,
            draft_tokens=self._draft_tokens,
            in_flight=self._in_flight,
            recorder=recorder,
            recovery=self._recovery,
            reporter=self._reporter,
            max_running=req_to_token_pool.size,
            proposer=self._proposer,
            early_starts=self.early_starts,
            remote=rows_of(
                *(self.role, self.early_starts, self._draft_tokens),
                *(self.runtime, self._states, self.placement.segments.stored),
            ),
        )
        req_to_token_pool.segments = self.placement.segments
        req_to_token_pool.on_arrival = self.receive
        req_to_token_pool.on_free = self.release

    def _open_draft_tokens(self, requests: int) -> None:
        """Allocate the draft token buffer; open the inner drafter, if there is one.

        Args:
            requests: Most running requests.
        """
        config, model = self._config, self.model_runner.model_config
        rows = len(self.placement.table)
        self._texts: Texts | None = None
        self._proposer: InnerProposer | None = None
        if not config.proposals:
            self._draft_tokens = DraftTokenBuffer(rows, config.most_drafts, self.device)
            return
        longest = model.context_len + config.most_drafts + 1
        self._texts = Texts(requests, longest, self.device)
        self._draft_tokens = DraftTokenBuffer(
            rows, config.most_drafts, self.device, self._texts
        )
        small, features = self._draft_model, None
        if small is not None:
            small.open(ring_of(config), requests)
        if isinstance(small, DraftHead):
            size, kind = small.features, small.dtype
            features = Features(requests, config.ring_reach, size, kind, self.device)
        self._proposer = InnerProposer(
            open_drafter(config, self._texts, small, features),
            self._draft_tokens,
            model.vocab_size,
            config.proposals,
            self._tp_sync,
            self.placement.counters,
        )

    def init_attention_backends(self) -> None:
        """See ``BaseSpecWorker``; also installs the observers of queries and keys."""
        self.placement.observer.attach(self.model_runner.model)

    # -- called by the scheduler ------------------------------------------------

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run one prefill or decode iteration of SGLang's batch."""
        if batch.forward_mode.is_decode():
            result = self._decoding.run(batch)
        else:
            with self._decoding.prefill(batch):
                result = self._prefill(batch)
        result.next_draft_input = VeriCacheSpecInput()
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """Record the results of a decode, which SGLang has copied to the host.

        Called for every decode result, in order, before it is processed
        (``batch_result_processor.py``).
        """
        with self._recovery.of_all():
            self._in_flight.record_reported()

    def prepare_for_kv_cache_release(self, req: Req) -> None:
        """Restore a finished request's full KV for the prefix tree, if there is room.

        Looked up by name in ``batch_result_processor.py``, right before the release.
        """
        if is_replay(req.rid):
            req.skip_radix_cache_insert = True
        state = self._states.get(req.rid)
        if state is not None and state.lost:
            state = None
        known = False
        with self._recovery.of_all():
            restorable = self.placement.joins(state)
            if state is not None:
                if state.parts is not None and restorable:
                    self.placement.restore(state, self._tree_cache)
                keep_last_token(state)
            known = True
        if not known:  # the contents of its block-table row
            req.skip_radix_cache_insert = True

    def receive(self, batch: ScheduleBatch, tokens: torch.Tensor) -> None:
        """Create the states of requests whose prompt was prefilled by another server.

        Args:
            batch: SGLang's PREBUILT batch; row lengths are those of the arrived KV.
            tokens: [n] int64, their last tokens, which have no KV.
        """
        self._tree_cache = batch.tree_cache
        with self._recovery.of_all():
            self._draft_tokens.start(batch.req_pool_indices, tokens, batch.seq_lens)
            lengths = batch.seq_lens_cpu.tolist()
            for req, length in zip(batch.reqs, lengths, strict=True):
                with self._recovery.of_arrival(req):
                    self._arrive(req, length)

    def release(self, req: Req) -> None:
        """Forget a request whose row SGLang frees: finished, aborted or retracted."""
        each_of = self._recovery.each_of
        each_of(
            lambda: self.placement.observer.forget(req.rid),
            lambda: self._request_admission.forget(req.rid),
        )
        if self.early_starts is not None:
            self.early_starts.forget(req.rid)
        state = self._states.pop(req.rid, None)
        if state is None:
            return
        each_of(
            lambda: self._learn(state),
            lambda: self.runtime.leave(req.rid),
            state.drop_drafts,  # roll back the grammar, which a retracted request keeps
        )
        if state.parts is not None:
            # A retracted request prefills again and is uncompressed until then.
            req.skip_radix_cache_insert = not state.parts.insertable
            self.placement.release(state, each_of)
            self.placement.check(self._states)
        if not self._states:
            self._reporter.idle()

    def _learn(self, state: RequestState) -> None:
        """Let the inner drafter learn from a request that has finished."""
        if self._proposer is not None and state.req.finished() and not state.lost:
            self._proposer.finish(state)

    def begin_iteration(self, scheduler: Any) -> None:
        """Reset what an error has made unreliable, on all ranks at once; serve peers.

        Called at the begin of every scheduler iteration, before it receives requests
        (patches: managers_scheduler).

        Args:
            scheduler: SGLang's ``Scheduler``.
        """
        error = self._recovery.sync_errors()
        if error is not None:
            if scheduler.disagg_decode_transfer_queue is not None:
                raise error  # other servers write to slots that would be freed
            self._reset_requests(scheduler, error)
        doubts = self._recovery.doubtful or self.placement.segments.abandoned
        if doubts and self._tp_sync.every(scheduler.is_fully_idle()):
            self._forget_all()
            scheduler.flush_cache(empty_cache=False)
        if self.role is not None:
            transport, sleeper = self.role.transport, scheduler.idle_sleeper
            if sleeper is not None and transport.ready not in sleeper.poller:
                sleeper.poller.register(transport.ready, POLLIN)
            channels = scheduler.ipc_channels
            transport.wake_on(channels.recv_from_tokenizer, channels.recv_from_rpc)
            self.role.exchange(scheduler)
        if self.early_starts is not None:
            self._tree_cache = scheduler.tree_cache
            with self._recovery.of_all():
                self.early_starts.take(scheduler)

    def _reset_requests(self, scheduler: Any, error: Exception) -> None:
        """Reset the KV of all requests, the prefix cache and all accounting at once.

        Nothing is freed individually, because the accounting is unreliable.

        Args:
            scheduler: SGLang's ``Scheduler``; the requests return to its queue.
            error: Why.
        """
        from sglang.srt.managers.scheduler import _make_abort_req

        running, last = scheduler.running_batch, scheduler.last_batch
        held = [*running.reqs]
        if last is not None and last.forward_mode.is_extend():
            held += last.reqs
        if scheduler.chunked_req is not None:
            held.append(scheduler.chunked_req)
        back = [
            req for req in {id(req): req for req in held}.values() if not req.finished()
        ]
        running.filter_batch(keep_indices=[])
        running.batch_is_full = False
        for req in back:
            scheduler.req_to_token_pool.free(req)
            req.kv.mark_kv_released()
            req.reset_for_retract()
            req.vericache_lost = False
            if req.to_finish is None:
                self._recovery.charge(req, error)
        if scheduler.enable_overlap:
            # Results are ignored of requests that were retracted.
            while scheduler.result_queue:
                scheduler.process_batch_result(*scheduler.result_queue.popleft())
        scheduler.last_batch = scheduler.chunked_req = None
        self._forget_all()
        scheduler.tree_cache.reset()
        scheduler.req_to_token_pool.clear()
        scheduler.token_to_kv_pool_allocator.clear()
        if not self._tp_sync.alone:
            # It may have been the cache of one rank, and fail for these requests again.
            self.placement.segments.abandon()
        for req in back:
            if req.to_finish is None:
                scheduler._add_request_to_queue(req, is_retracted=True)
            else:
                told = _make_abort_req(req, finished_reason=req.to_finish.to_json())
                scheduler.ipc_channels.send_to_tokenizer.send_output(told, req)

    def _forget_all(self) -> None:
        """Reset all accounting; SGLang resets its slots and cache at the same time."""
        self._in_flight.settle()
        for state in list(self._states.values()):
            self.release(state.req)
        self.runtime.clear()
        self.placement.forget_all()
        if self._proposer is not None and not self._tp_sync.alone:
            self._proposer.stop()  # it may have failed on one rank only
        self._recovery.complete()

    def _new_weights(self) -> None:
        """Leave the store and other servers, which have the previous weights."""
        self.placement.segments.leave_store()
        if self.role is not None:
            self.role.change()

    def clear_cache_pool(self) -> None:
        """Reset everything; SGLang has flushed its caches and no request runs."""
        self._in_flight.record_all()
        for state in list(self._states.values()):
            self.release(state.req)

    def report(self) -> dict[str, Any]:
        """Return counters and current holdings, for ``GET /get_server_info``."""
        return self._guard.call(
            "report",
            lambda: {
                **with_former_names("report", self._figures()),
                "eager_reasons": eager_reasons(self.model_runner),
                "role": self._config.role,
                **self._reporter.report(self._states),
            },
            {},
        )

    def _figures(self) -> dict[str, int | float | str]:
        return self._totals.over(
            {
                **self.placement.report(),
                **self.runtime.figures(),
                **graph_figures(self.model_runner),
                "answer_epoch": self.control_gate.epoch,
                "kv_read_bytes_per_s": self._read_rate(),
                "running": len(self._states),
                **STANDALONE,
                **(self.role.figures() if self.role is not None else {}),
            }
        )

    def _read_rate(self) -> float:
        """Return the rate at which forwards read KV, from observed iterations."""
        read_s = self.runtime.estimates.iteration.coefficients.per_read_s
        return self.placement.geometry.token_bytes / read_s if read_s else 0.0

    # -- prefill ----------------------------------------------------------------

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        self._tree_cache = batch.tree_cache
        ready = False
        with self._recovery.of_all():
            # A rank that failed as it matched prefixes may have chosen other requests.
            self._tp_sync.agree(last=True)
            ready = True
        kept: list[tuple[int, int, int]] = []
        if ready:
            if self._proposer is not None:
                kept = self._proposer.of_prompts(_chunks(batch))
            result = self._target_worker.forward_batch_generation(
                batch, capture_hidden_mode=hidden_mode(features=bool(kept))
            )
        else:
            result = self._nothing_prefilled(batch)
        result.accept_lens = torch.ones(
            len(batch.reqs), dtype=torch.int32, device=self.device
        )
        if ready and not batch.is_prefill_only and batch.reqs:
            with self._recovery.of_all():
                put_known(batch, result)
                if self._proposer is not None and kept:
                    self._proposer.observe_prompts(kept, take_hidden(result))
                requests = batch.req_pool_indices.to(torch.int64)
                self._draft_tokens.start(
                    requests, result.next_token_ids, batch.seq_lens
                )
                lengths, rows = batch.seq_lens_cpu.tolist(), []
                for i, (req, length) in enumerate(
                    zip(batch.reqs, lengths, strict=True)
                ):
                    with self._recovery.of_arrival(req):
                        state = self._arrive(req, length, unreported=1)
                        rows.append(PendingRow(state, i, state.drafts))
                self._in_flight.launch(InFlightForward(result, 1, rows, decode=False))
                if not all(row.state.asynchronous for row in rows):
                    self._in_flight.record_all()
        result.new_seq_lens = batch.seq_lens
        result.speculative_num_draft_tokens = self._config.most_drafts + 1
        return result

    def _nothing_prefilled(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Return a result without tokens; all requests are prefilled again."""
        for req in batch.reqs:
            req.is_retracted = True  # SGLang ignores results of these
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=torch.zeros(
                len(batch.reqs), dtype=torch.int64, device=self.device
            ),
        )

    def _fits(self, length: int) -> bool:
        """Return whether a prompt is long enough, and the compressor works."""
        known = self.placement.compressor.budget(length) is not None
        return known and not self.placement.guard.off

    def _would_draft(self, req: Req, length: int) -> bool:
        return self._fits(length) and self._state_factory.drafts(req)

    def _arrive(self, req: Req, length: int, unreported: int = 0) -> RequestState:
        """Create a request's state; each prefill chunk replaces the previous one."""
        fits = self._fits(length)
        state = self._state_factory.state_of(req, length, fits, unreported)
        self._tp_sync.same_noise(state)
        self._states[req.rid] = state
        req.vericache_room, req.vericache_lost = self.placement.plain_room, False
        req.vericache_swapped_slots = 0
        known = len(req.origin_input_ids) + len(req.output_ids)
        whole = length + 1 - unreported >= known
        if self._texts is not None and state.stats.proposals:
            text = [*req.origin_input_ids, *req.output_ids]
            self._texts.put(state.req_pool_idx, text[:length])
            if whole and self._proposer is not None:
                self._proposer.begin(state, length)
        if whole and not state.stats.enabled:  # its observations will not be used
            self.placement.observer.forget(req.rid)
        return state


def _chunks(batch: ScheduleBatch) -> Iterator[PromptChunk]:
    """Return what each request of a prefill computes."""
    for req, start, count in zip(
        batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
    ):
        whole = len(req.origin_input_ids) + len(req.output_ids)
        yield PromptChunk(req.kv.req_pool_idx, start, count, whole)
