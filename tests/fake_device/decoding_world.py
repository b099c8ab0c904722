"""The decode loop on the device: all of it is the engine's, the model says one token.

SGLang's scheduler is played as far as it touches the loop: it allocates slots, hands
back the lengths that were published, and processes a result one iteration later.
"""

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from known_kv import DIM, HEADS, LAYERS
from ragged_world import Runner
from scenarios import engine, scenario
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import _CONTEXT
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.server_args import ServerArgs

from vericache_sglang.attention.cuda_backend import RaggedAttnBackend
from vericache_sglang.kv.calibration import starting_coefficients
from vericache_sglang.observability.guard import Guard
from vericache_sglang.observability.iteration_reporter import IterationReporter
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.runtime.admission import RequestAdmission
from vericache_sglang.runtime.algorithm import NAME, VeriCacheAlgorithm
from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
from vericache_sglang.runtime.forward.graphs import eager_reasons, graph_figures
from vericache_sglang.runtime.forward.mixed import MixedForward
from vericache_sglang.runtime.in_flight import InFlightQueue
from vericache_sglang.runtime.iteration import Decoding
from vericache_sglang.runtime.probing import Probing
from vericache_sglang.runtime.recovery import Recovery
from vericache_sglang.runtime.result_recorder import ResultRecorder
from vericache_sglang.runtime.scheduler_settings import runtime_settings
from vericache_sglang.runtime.worker import VeriCacheWorker
from vericache_sglang.scheduling.runtime import Runtime

QUERY_HEADS = 2 * HEADS
VOCABULARY, SAID = 586, 72
"""The demo model's, and its token of "a"."""
SERVED = 30
"""Tokens of a prompt."""
CONTEXT = 90


class Plain(SimpleNamespace):
    """A model's configuration that asks for nothing special."""

    def __getattr__(self, name):
        return None


def model_runner(made, sampler):
    """Return what the engine and SGLang read of the target's runner."""
    return SimpleNamespace(
        device="cuda",
        is_draft_worker=False,
        lora_manager=None,
        decode_cuda_graph_runner=None,
        token_to_kv_pool=made.pool,
        req_to_token_pool=made.rows,
        sampler=sampler,
        kv_index_translator=SimpleNamespace(rebind_write_loc=lambda forward: None),
        ngram_embedding_manager=SimpleNamespace(enabled=False),
        shared_read_done_event=None,
        hisparse_coordinator=None,
        device_timer=None,
        spec_algorithm=VeriCacheAlgorithm(NAME, None),
        attn_dcp_size=1,
        model_config=Plain(context_len=CONTEXT),
    )


def sampler():
    """Return SGLang's sampler, without the groups of ranks it would ask."""
    made = object.__new__(Sampler)
    torch.nn.Module.__init__(made)
    made.rl_on_policy_target = None
    made.enable_deterministic = made.use_log_softmax_logprob = False
    made.use_ascend_backend = False
    made.output_logprob_processor = OutputLogprobProcessor()
    return made


class Target:
    """Stands for ``TpModelWorker``: attention is real, every next token is ``says``.

    Args:
        runner: SGLang's, of the model.
        graphs: Forwards run in our graph runner, eagerly over its static buffers.
    """

    def __init__(self, runner, graphs=False):
        self.model_runner, self.says = runner, SAID
        options = (runner, SimpleNamespace(forward_extend=None), 8)
        self.backend = RaggedAttnBackend(*options)
        self.attention = [
            RadixAttention(QUERY_HEADS, DIM, DIM**-0.5, HEADS, layer_id=i)
            for i in range(LAYERS)
        ]
        self.graphs = None
        if graphs:
            world = SimpleNamespace(ragged=self.backend, runner=runner, options=options)
            self.graphs = Runner(world, [1, 2, 4])
            self.graphs.serve(runner, self.layers)

    def forward_batch_generation(
        self, batch, forward_batch=None, is_verify=False, *, capture_hidden_mode=None
    ):
        forward = forward_batch or ForwardBatch.init_new(
            batch,
            self.model_runner,
            capture_hidden_mode=capture_hidden_mode,
            return_hidden_states_before_norm=False,
        )
        result = GenerationBatchResult(logits_output=self._forward(forward))
        if not is_verify:
            logits = result.logits_output.next_token_logits
            result.next_token_ids = torch.argmax(logits, dim=-1)
        return result

    def _forward(self, forward):
        """Run a forward as ``ModelRunner._forward_raw`` does."""
        graphs = self.model_runner.decode_cuda_graph_runner
        if graphs is not None and graphs.can_run_graph(forward):
            return graphs.execute(forward)
        self.backend.init_forward_metadata(forward)
        logits = self.layers(self.backend, forward)
        return LogitsProcessorOutput(next_token_logits=logits)

    def layers(self, backend, batch):
        """Attend in every layer; returns logits [tokens, VOCABULARY]."""
        count = len(batch.input_ids)
        for layer in self.attention:
            q = torch.ones(count, QUERY_HEADS * DIM, device="cuda")
            kv = torch.ones(2, count, HEADS, DIM, device="cuda")
            backend.forward(q, *kv, layer, batch)
        logits = torch.zeros(count, VOCABULARY, device="cuda")
        logits[:, self.says] = 1.0
        return logits


class Server:
    """The loop and its requests.

    Args:
        device: The device.
        made: A ``TinyEngine``.
        graphs: As of ``Target``.
    """

    def __init__(self, device, made, graphs=False):
        self.device, self.engine = device, made
        config, placement = made.config, made.placement
        tp_sync = placement._tp_sync
        runner = model_runner(made, sampler())
        self.target, self.states = Target(runner, graphs), {}
        self.runtime = Runtime(
            runtime_settings(config, placement, deterministic=False), tp_sync.estimates
        )
        rows = placement.verify_rows
        probing = Probing(
            made.selector,
            placement.observer,
            placement.handles,
            runner,
            rows[0],
            tp_sync,
        )
        self.draft_tokens = DraftTokenBuffer(
            len(placement.table), config.draft_length, "cuda"
        )
        recorder = ResultRecorder(placement, self.runtime, self.states)
        reporter = IterationReporter(self.runtime, placement.link_log, {}, Guard())
        self.in_flight = InFlightQueue(recorder.record, reporter.recorded)
        self.loop = Decoding(
            states=self.states,
            target_worker=self.target,
            placement=placement,
            runtime=self.runtime,
            tp_sync=tp_sync,
            overlap=True,
            request_admission=RequestAdmission(
                placement, probing, self.runtime, tp_sync, overlap=True
            ),
            mixed=MixedForward(
                placement,
                self.target,
                self.draft_tokens,
                self.in_flight,
                recorder,
                overlap=True,
            ),
            draft_tokens=self.draft_tokens,
            in_flight=self.in_flight,
            recorder=recorder,
            recovery=Recovery(
                self.states, self.runtime, placement, tp_sync, strict=True
            ),
            reporter=reporter,
            max_running=6,
        )
        self.batch, self._last, self._launched = None, None, False

    def admit(self, *rids, tokens=SERVED, asks=None, **more):
        """Prefill prompts and put them in one batch.

        Args:
            rids: Of the requests.
            tokens: Of each prompt.
            asks: Called with the first request's state and the batch, to have it ask
                for more.
            more: Attributes of all states.
        """
        states = [self._state(rid, tokens, more) for rid in rids]
        self.states |= {state.rid: state for state in states}
        self.draft_tokens.put(states)
        lengths = [state.row_length for state in states]
        self.batch = self._merged(torch.tensor(lengths, device="cuda"))
        if asks is not None:
            asks(states[0], self.batch)

    def join(self, rid, tokens=SERVED, asks=None):
        """Prefill a prompt beside requests that run; returns what waits in it.

        Args:
            rid: Of the request.
            tokens: Of its prompt.
            asks: As of ``admit``, of the one that joins.
        """
        first = {"outputs": [], "committed_in_flight": 1}
        state = self._state(rid, tokens, first)
        length = torch.tensor([tokens], device="cuda")
        batch_index = torch.tensor([state.req_pool_idx], device="cuda")
        self.states[rid] = state
        self.batch = self._merged(torch.cat([self.batch.seq_lens, length]), self.batch)
        if asks is not None:
            asks(state, self.batch)
        first = GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=torch.full([1], SAID, device="cuda"),
        )
        worker = SimpleNamespace(
            device="cuda",
            _target_worker=SimpleNamespace(
                forward_batch_generation=lambda batch, capture_hidden_mode: first
            ),
            _draft_tokens=self.draft_tokens,
            _proposer=None,
            _in_flight=self.in_flight,
            _config=self.engine.config,
            _recovery=self.loop.recovery,
            _tp_sync=self.loop.tp_sync,
            _arrive=lambda req, length, unreported: state,
        )
        prompt = SimpleNamespace(
            tree_cache=self.engine.tree,
            reqs=[state.req],
            is_prefill_only=False,
            req_pool_indices=batch_index,
            seq_lens=length,
            seq_lens_cpu=torch.tensor([tokens]),
        )
        with self.device.noting() as waits:
            VeriCacheWorker._prefill(worker, prompt)
            first.copy_done = torch.cuda.Event()
            first.copy_to_cpu(return_logprob=False)
            self.in_flight.record_reported()
        self._process()
        self._launched = False
        return waits

    def _state(self, rid, tokens, more):
        """Prefill a prompt; returns the state of its request."""
        state = self.engine.admit(rid, rid, tokens)
        for name, value in {"asynchronous": True, **more}.items():
            setattr(state, name, value)
        for none in ("lora_id", "grammar", "token_type_ids", "bootstrap_room"):
            setattr(state.req, none, None)
        state.req.return_logprob = state.req.to_finish = False
        state.req.finished = lambda: False
        return state

    def _merged(self, lengths, before=None):
        """Return the batch of all requests, whose rows are so long.

        Args:
            lengths: [requests] int64, of the device.
            before: The batch of all but the last one, and what they ask for.
        """
        states = list(self.states.values())
        count = len(states)
        batch = ScheduleBatch(
            reqs=[state.req for state in states],
            req_to_token_pool=self.engine.rows,
            token_to_kv_pool_allocator=self.engine.allocator,
            tree_cache=self.engine.tree,
            device="cuda",
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.tensor(
                [state.req_pool_idx for state in states], device="cuda"
            ),
            seq_lens=lengths,
            sampling_info=SamplingBatchInfo(
                temperatures=torch.ones(count, 1, device="cuda"),
                top_ps=torch.ones(count, device="cuda"),
                top_ks=torch.ones(count, dtype=torch.int32, device="cuda"),
                min_ps=torch.zeros(count, device="cuda"),
                is_all_greedy=True,
                is_any_greedy=True,
                need_top_p_sampling=False,
                need_top_k_sampling=False,
                need_min_p_sampling=False,
                vocab_size=VOCABULARY,
                device="cuda",
            ),
        )
        if before is not None:
            batch.has_grammar = before.has_grammar
            batch.return_logprob = before.return_logprob
            for name, none in (("top_logprobs_nums", 0), ("token_ids_logprobs", None)):
                known = getattr(before, name)
                setattr(batch, name, [*known, none] if known else known)
        return batch

    def run(self, iterations, most=None):
        """Run the loop; returns what waited.

        Args:
            iterations: How many.
            most: How often one of them may wait; None: it is not looked at.
        """
        total = Counter()
        for _ in range(iterations):
            waits = self._step()
            assert most is None or waits.total() <= most, f"in one iteration: {waits}"
            total += waits
        return total

    def _step(self):
        batch = self.batch
        for request in self.engine.requests.values():
            assert self.engine.grow(request, 12)
        if batch.has_grammar:  # what may follow depends on the last result
            self._process()
        with self.device.noting() as waits:
            result = self.loop.run(batch)
            if self._launched:
                self.in_flight.record_reported()
        if not batch.has_grammar:
            self._process()
        self._launched = True
        batch.seq_lens = result.new_seq_lens
        batch.forward_mode = ForwardMode.DECODE
        result.copy_done = torch.cuda.Event()
        result.copy_to_cpu(batch.return_logprob, return_hidden_states=False)
        self._last = result
        return waits

    def _process(self):
        """Process the last result, as the scheduler does."""
        last, self._last = self._last, None
        if last is None:
            return
        counts = last.accept_lens.tolist()
        for req, count in zip(self.batch.reqs[: len(counts)], counts, strict=True):
            emitted = [self.target.says] * count
            req.kv.kv_committed_len += count
            req.output_ids.extend(emitted)
            if req.grammar is not None:
                for token in emitted:
                    req.grammar.accept_token(token)


@contextmanager
def published_arguments():
    """Have SGLang know arguments, those of a server that was given none."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_server_args", "_config_bags", "_overrides_log", "_publish_role"):
            patch.setattr(_CONTEXT, name, getattr(_CONTEXT, name))
        known = {"device": "cpu", "sampling_backend": "pytorch"}
        _CONTEXT.set_server_args(ServerArgs(model_path="none", **known))
        yield


@contextmanager
def server(device, graphs=False, **options):
    """Open a server over a tiny engine on the device."""
    with published_arguments(), engine(**options) as made:
        yield Server(device, made, graphs)


SETTLED, LOOKED_AT, MOST = 6, 12, 400
"""Iterations until requests draft, those that are looked at, and what is too many."""


def served(device, made, graphs=False, asks=None, **more):
    """Serve three requests that draft and verify; returns what waits meanwhile.

    Every draft is right, so a round comes to more than one token. Iterations go on
    until there was a round: how soon a copy has come back is the threads' matter.

    Args:
        device: The device.
        made: A ``TinyEngine``.
        graphs: As of ``Target``.
        asks: As of ``Server.admit``; an iteration may then wait once.
        more: As of ``Server.admit``.
    """
    found = Server(device, made, graphs)
    found.admit("a", "b", "c", asks=asks, **more)
    found.run(SETTLED)
    counters, waits = made.placement.counters, Counter()

    def counted():
        return counters.cycles, counters.accepted, counters.draft_rows

    before = counted()
    for _ in range(MOST):
        waits += found.run(LOOKED_AT, most=None if asks is None else 1)
        if all(new > old for new, old in zip(counted(), before, strict=True)):
            break
    else:
        pytest.fail("nothing was drafted and verified")
    if graphs:
        assert graph_figures(found.target.model_runner)["graph_forwards"] > 0
        assert not eager_reasons(found.target.model_runner)
    return waits


@scenario("boot: time iterations")
def time_iterations(device):
    with engine(slots=900) as made, device.noting() as waits:
        layer = RadixAttention(QUERY_HEADS, DIM, DIM**-0.5, HEADS, layer_id=0)
        starting_coefficients(made.pool, [layer] * LAYERS, draft_length=4)
    return waits


def decoded(residency, graphs):
    """Return a scenario of the loop's steady state."""

    def run(device):
        with published_arguments(), engine(residency=residency, slots=400) as made:
            return served(device, made, graphs)

    return run


for residency in ("device", "host"):
    name = f"loop: draft and verify, {residency}"
    scenario(name)(decoded(residency, graphs=False))
    scenario(f"{name}, in graphs")(decoded(residency, graphs=True))


def decoded_plainly(graphs):
    """Return a scenario of requests that never draft."""

    def run(device):
        with server(device, graphs, slots=400) as made:
            made.admit("a", "b", stats=RequestStats(False, 8))
            waits = made.run(LOOKED_AT)
            replayed = made.target.graphs.replayed if graphs else []
        assert replayed == [("DECODE", 2)] * LOOKED_AT * graphs
        return waits

    return run


scenario("loop: decode plainly")(decoded_plainly(graphs=False))
scenario("loop: decode plainly, in graphs")(decoded_plainly(graphs=True))


@scenario("loop: the first compressions")
def begin_drafting(device):
    with server(device, residency="host", slots=400) as made:
        made.admit("a", "b", "c")
        return made.run(SETTLED)
