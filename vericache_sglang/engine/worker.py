"""The speculative worker SGLang calls: plans, prepares, runs one forward, accepts."""

from __future__ import annotations

import atexit
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.engine.agreement import open_agreement
from vericache_sglang.engine.arrival import Arrivals
from vericache_sglang.engine.calibration import starting_coefficients
from vericache_sglang.engine.departure import keep_last_token, last_action
from vericache_sglang.engine.entrance import Entrance
from vericache_sglang.engine.mixed import MixedForward
from vericache_sglang.engine.model_services import ModelServices
from vericache_sglang.engine.observers import open_observers
from vericache_sglang.engine.plain import run_plain, samples_as_sglang
from vericache_sglang.engine.probing import Probing
from vericache_sglang.engine.query_tails import attention_layers
from vericache_sglang.engine.residence import PLAIN_ROOM, Residence
from vericache_sglang.engine.row_edit import room
from vericache_sglang.engine.runtime_settings import runtime_settings
from vericache_sglang.engine.shadow import Shadow
from vericache_sglang.engine.spec_input import VeriCacheSpecInput
from vericache_sglang.engine.state import Layout, RequestState
from vericache_sglang.engine.watch import Watch
from vericache_sglang.errors import TransferError
from vericache_sglang.scheduling.estimates import Estimates
from vericache_sglang.scheduling.iteration_model import IterationModel, Work
from vericache_sglang.scheduling.plan import Move, Plain, Plan, World
from vericache_sglang.scheduling.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

    from vericache_sglang.config.schema import VeriCacheConfig

logger = logging.getLogger(__name__)

IDLE_SECONDS = 2e-4
"""Pause of an iteration in which every request waits for its reload."""

OBSERVE_EVERY = 8
"""Iterations between two samples of the iteration's time while nobody drafts."""


class VeriCacheWorker(BaseSpecWorker):
    """See ``BaseSpecWorker``; target and drafter are the same model runner.

    Owns the truth about every decoding request (``RequestState``). Per iteration: poll
    reloads, have the runtime plan, start reloads, one forward, accept, make the plan's
    moves. SGLang's scheduler sees rows as long as the table says and accept lengths
    between 0 (drafting or waiting) and d + 1 (verified).

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
        self._overlap = not server_args.disable_overlap_schedule
        self._arrivals = Arrivals(
            config,
            self.model_runner.model_config.vocab_size,
            self.device,
            overlap=self._overlap,
            deterministic=server_args.enable_deterministic_inference,
        )
        self._states: dict[str, RequestState] = {}
        # Called by the hooks on the scheduler (patches: managers_scheduler_shadow).
        self.shadow = Shadow(config.shadow_rate, config.seed, self._new_weights)
        self._launched = 0.0
        self._work: Work | None = None

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
        self._max_running: int = req_to_token_pool.size
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        pool = token_to_kv_pool_allocator.get_kvcache()
        layers = attention_layers(self.model_runner.model)
        start = starting_coefficients(pool, layers, self._config.draft_length)
        self._measured = Estimates(iteration=IterationModel(start))
        tp_size = self._server_args.tp_size
        self._agreement = open_agreement(self._measured, tp_size, self._max_running)
        services = ModelServices(self.model_runner, self._server_args)
        compressor = create_compressor(self._config.compressor, self._config.seed)
        compressor = compressor.bind(services, ranks=tp_size)
        self.residence = Residence(
            self._config,
            self._agreement,
            req_to_token_pool,
            token_to_kv_pool_allocator,
            compressor,
            self._server_args,
        )
        self._agreement.hear(self.residence.host_slots, ())
        self.runtime = Runtime(
            runtime_settings(self._config, self.residence), self._agreement.estimates
        )
        probing = Probing(
            compressor.selector,
            self.residence.watch,
            self.residence.places,
            self.model_runner,
            self.residence.verify_rows[0],
        )
        self._entrance = Entrance(
            self.residence, probing, self.runtime, overlap=self._overlap
        )
        self._mixed = MixedForward(
            self._config,
            self.residence,
            self.runtime,
            self._target_worker,
            overlap=self._overlap,
        )
        leads = self._agreement.leads
        observers = open_observers(self._config, self._figures) if leads else []
        self._watch = Watch(self.runtime, self.residence.link_log, observers)
        atexit.register(self._watch.close)
        # Read by the radix cache as SGLang creates it (``TieredCache``).
        req_to_token_pool.vericache_segments = self.residence.segments
        # Called by the hook on ReqToTokenPool.free (patches: mem_cache_memory_pool).
        req_to_token_pool.vericache_on_free = self.release

    def init_attention_backends(self) -> None:
        """See ``BaseSpecWorker``; from here on the layers report their queries."""
        self.residence.watch.watch(self.model_runner.model)

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
            self._work = None  # the time until the next decode is not one iteration's
            result = self._prefill(batch)
        result.next_draft_input = VeriCacheSpecInput(len(batch.reqs))
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def prepare_for_kv_cache_release(self, req: Req) -> None:
        """Make a finished request's row whole for the prefix tree, if there is room.

        Looked up by name in ``batch_result_processor.py``, right before the release.
        """
        self.shadow.note_finished(req)
        state = self._states.get(req.rid)
        if state is None or state.lost:
            return
        if state.parts is not None:
            self.residence.join(state, self._tree_cache)
        keep_last_token(state)

    def release(self, req: Req) -> None:
        """Forget a request whose row SGLang frees: finished, aborted or retracted."""
        self.residence.watch.forget(req.rid)
        self._entrance.forget(req.rid)
        state = self._states.pop(req.rid, None)
        if state is None:
            return
        self.runtime.leave(req.rid)
        state.drop_drafts()  # a retracted request keeps its grammar
        if state.parts is not None:
            # A retracted request prefills again and is an ordinary one until split.
            req.skip_radix_cache_insert = not state.parts.insertable
            self.residence.release(state)
            self.residence.check(self._states)
        if not self._states:
            self._watch.idle()

    def _new_weights(self) -> None:
        """Leave the store alone from now on: its KV is of the weights before."""
        self.residence.segments.leave_store()

    def clear_cache_pool(self) -> None:
        """Forget everything; SGLang has flushed its caches and nothing runs."""
        for state in list(self._states.values()):
            self.release(state.req)

    def report(self) -> dict[str, Any]:
        """Return counters and what is held now, for ``GET /get_server_info``."""
        return {**self._figures(), **self._watch.report(self._states)}

    def _figures(self) -> dict[str, int | float]:
        return {
            **self.residence.report(),
            **self.runtime.report(),
            **self.shadow.report(),
            "kv_read_bytes_per_s": self._read_rate(),
            "running": len(self._states),
        }

    def _read_rate(self) -> float:
        """Return the rate at which forwards read KV, as the iterations show it."""
        read_s = self.runtime.estimates.iteration.coefficients.per_read_s
        return self.residence.geometry.token_bytes / read_s if read_s else 0.0

    # -- prefill ----------------------------------------------------------------

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        self._tree_cache = batch.tree_cache
        result = self._target_worker.forward_batch_generation(batch)
        if not batch.is_prefill_only and batch.reqs:
            tokens = result.next_token_ids.tolist()
            lengths = batch.seq_lens_cpu.tolist()
            for req, token, length in zip(batch.reqs, tokens, lengths, strict=True):
                # A middle chunk's state is overwritten by the next chunk's.
                fits = self.residence.splitter.budget(length) is not None
                state = self._arrivals.state_of(req, token, length, fits)
                self._agreement.same_noise(state)
                self._states[req.rid] = state
                req.vericache_room, req.vericache_lost = PLAIN_ROOM, False
                req.vericache_parked_slots = 0
                whole = length >= len(req.origin_input_ids) + len(req.output_ids)
                if whole and not state.eligible:  # nobody will read its queries
                    self.residence.watch.forget(req.rid)
        result.accept_lens = torch.ones(
            len(batch.reqs), dtype=torch.int32, device=self.device
        )
        result.new_seq_lens = batch.seq_lens
        result.speculative_num_draft_tokens = self._config.draft_length + 1
        return result

    # -- one decode iteration ---------------------------------------------------

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        self._observe_last()
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
        self._entrance.pass_on(batch, seats)
        as_sglang = all_here and samples_as_sglang(states, batch.sampling_info)
        if as_sglang and not self.runtime.tracks:
            # Nothing to plan and nothing to draft: no slower than plain SGLang.
            self._watch.begin(seats, None)
            result = self._run_plain(batch, states)
            self._watch.end(result.accept_lens, ())
            return result
        plan = self._plan(batch, len(states))
        actions = {
            i: last_action(state) or plan.rows.get(state.rid) or Plain(state.rid)
            for i, state in seats.items()
        }
        self._watch.begin(seats, actions)
        if as_sglang and all(isinstance(action, Plain) for action in actions.values()):
            result = self._run_plain(batch, states)
        else:
            result, self._work = self._mixed.run(batch, seats, actions)
            if self._work is None:
                time.sleep(IDLE_SECONDS)
        moves = self._make_moves(plan, batch)
        self._publish(result, seats, len(batch.reqs))
        self._watch.end(result.accept_lens, moves)
        return result

    def _plan(self, batch: ScheduleBatch, rows: int) -> Plan:
        reloads = self.residence.reloads
        self.residence.poll_outgoing()
        heard = self._agreement.hear(self.residence.host_slots, reloads.progress())
        arrived, failed = reloads.poll(heard.reloads)
        for rid in failed:
            self._note_failure(rid)
        world = World(
            free_slots=room(batch.tree_cache),
            host_slots=heard.host_slots,
            rows=rows,
            blocked=bool(batch.batch_is_full) and rows < self._max_running,
            arrived=tuple(arrived),
            failed=tuple(failed),
        )
        plan = self.runtime.plan(world)
        self._agreement.check(world, plan)
        for stage_in in plan.stage_ins:
            state = self._states[stage_in.rid]
            state.figures.staged_bytes += self.residence.start_reload(state)
        self.residence.counters.note_drafting(self.runtime.drafting)
        return plan

    def _note_failure(self, rid: str) -> None:
        """Count a failed reload; the second in a row costs the request its KV."""
        if self.runtime.gives_up(rid):
            self._lose(self._states[rid])

    def _lose(self, state: RequestState) -> None:
        """Have the scheduler send a request back to prefill; nothing wrong was emitted.

        Read by the hook on the scheduler (patches: managers_scheduler_retraction).
        """
        logger.error("VeriCache: %s prefills again, its host copy is lost", state.rid)
        self.runtime.leave(state.rid)
        self.residence.segments.distrust(state.split.segments)
        state.lost = True
        state.req.vericache_lost = True
        state.req.vericache_distrusted = True
        self.residence.counters.reprefills += 1

    def _make_moves(self, plan: Plan, batch: ScheduleBatch) -> list[Move]:
        """Carry out what a plan moves; return what was moved."""
        done: list[Move] = []
        for move in plan.moves:
            state = self._states.get(move.rid)
            if state is None or state.lost:
                continue
            try:
                made = self.residence.make(move, state, batch.tree_cache)
            except TransferError as error:
                logger.error("VeriCache: %s: %s", state.rid, error)
                self._lose(state)
                continue
            if not made:
                self.runtime.refused(move)
                continue
            state.figures.moves[type(move).__name__.lower()] += 1
            on_host = state.layout is Layout.KEPT
            group = self.residence.staging_key(state.rid) if on_host else ""
            self.runtime.moved(move, group)
            batch.batch_is_full = False  # ask again whether somebody fits
            done.append(move)
        return done

    def _publish(
        self, result: GenerationBatchResult, seats: dict[int, RequestState], rows: int
    ) -> None:
        lengths = torch.ones(rows, dtype=torch.int64)
        for i, state in seats.items():
            lengths[i] = state.row_length
        result.new_seq_lens = lengths.to(self.device)

    def _observe_last(self) -> None:
        """Learn from the last iteration, launch to launch, if it was a decode too."""
        now = time.perf_counter()
        if self._work is not None:
            self._measured.iteration.observe(self._work, now - self._launched)
            self._work = None
        self._launched = now

    def _run_plain(
        self, batch: ScheduleBatch, states: list[RequestState]
    ) -> GenerationBatchResult:
        """Decode every request plainly; learn from it now and then."""
        counted = self.residence.counters.iterations
        if self.runtime.tracks or counted % OBSERVE_EVERY == 0:
            reads = sum(state.verified for state in states) + len(states)
            self._work = Work(len(states), reads, reads)
        self.residence.counters.plain_rows += len(states)
        return run_plain(batch, states, self._target_worker)
