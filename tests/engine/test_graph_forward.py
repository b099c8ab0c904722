"""Mixed batches and decodes through SGLang's real graph runner, and out of it again.

The runner is ``ragged_world.Runner``: SGLang's own but for the device. A graph is
played by the backend's captured metadata and the runner's static buffers, which is all
that a graph would read. The truth is the CPU's backend on the batch before that.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

from ragged_world import HEADS, KV_HEADS, WIDEST, Runner, World, layer  # noqa: E402

from vericache_sglang.engine.algorithm import NAME, VeriCacheAlgorithm  # noqa: E402
from vericache_sglang.engine.graph_forward import (  # noqa: E402
    EAGER_COUNTER,
    admits,
    capture_input,
    graph_figures,
    present,
    replay,
)

LONGEST = 150
"""Longest row the attention backends can list, in slots."""


class Tables:
    """Stands in for a model of one layer: q, k and v follow from a token alone."""

    def __init__(self, dim):
        random = torch.Generator().manual_seed(7)
        shapes = (HEADS * dim,), *[(KV_HEADS, dim)] * 2
        self.rows = [torch.randn(90, *shape, generator=random) for shape in shapes]

    def __call__(self, ids, positions):
        return [
            table[ids] + positions.view(-1, *[1] * (table.dim() - 1)) / 500
            for table in self.rows
        ]


class Graphs:
    """Stands in for SGLang's graph backend: replays what was captured, eagerly."""

    def __init__(self, harness):
        self.harness = harness

    def replay_session(self):
        return nullcontext()

    def replay(self, key, forward):
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        harness, tokens = self.harness, key.size
        captured, harness.backend.forward_metadata = harness.captured[tokens]
        buffers = harness.runner.buffers
        ids, positions = buffers.input_ids[:tokens], buffers.positions[:tokens]
        q, k, v = harness.tables(ids, positions)
        out = harness.backend.forward(q, k, v, layer(harness.world.dim), captured)
        harness.replayed.append(tokens)
        return LogitsProcessorOutput(next_token_logits=out)


class Server(Runner):
    """The graph runner of a server with VeriCache on a GPU."""

    def __init__(self, world, batch_sizes, name=NAME):
        super().__init__(world, batch_sizes)
        runner, model = self.runner, self.runner.model_runner
        model.spec_algorithm = VeriCacheAlgorithm(name, None)
        model.model_config = SimpleNamespace(context_len=LONGEST)
        model.decode_cuda_graph_runner, model.device = runner, "cuda:0"
        model.device_timer = model.is_draft_worker = None
        model.shared_read_done_event = None
        runner.device_module = SimpleNamespace(
            Event=lambda: SimpleNamespace(record=lambda: None)
        )
        runner.in_graph_metadata_prep_done = None
        runner.is_dllm, runner.backend = False, Graphs(self)
        self.tables, self.replayed = Tables(world.dim), []
        for tokens in reversed(self.grid):
            self.capture(tokens)

    @property
    def eager(self):
        return graph_figures(self.runner.model_runner)[EAGER_COUNTER]

    def admits(self, forward):
        return admits(type(self.runner).can_run_graph, self.runner, forward)

    def run(self, forward):
        """Run a forward as ``ModelRunner._forward_raw`` does; returns its logits."""
        if self.admits(forward):
            output = replay(type(self.runner).execute, self.runner, forward)
            return output.next_token_logits
        return self.run_eagerly(self.backend, forward)

    def run_eagerly(self, backend, forward):
        backend.init_forward_metadata(forward)
        q, k, v = self.tables(forward.input_ids, forward.positions)
        return backend.forward(q, k, v, layer(self.world.dim), forward)


def mixed(world, parts, where, queries, ids, loose=0):
    """Make the forward ``rows.build_forward`` makes on a GPU.

    The host's lists of lengths are too large by ``loose``.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    from vericache_sglang.engine.spec_input import VeriCacheSpecInput

    totals = torch.tensor([len(part) for part in parts])
    counts = torch.tensor(queries, dtype=torch.int32)
    prefixes = totals - counts
    positions = torch.cat(
        [torch.arange(n) + at for n, at in zip(queries, prefixes, strict=True)]
    )
    tails = [part[len(part) - n :] for part, n in zip(parts, queries, strict=True)]
    forward = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(queries),
        input_ids=ids,
        req_pool_indices=where,
        seq_lens=totals,
        seq_lens_cpu=totals + loose,
        seq_lens_sum=int(totals.sum()) + loose * len(queries),
        out_cache_loc=torch.cat(tails).long(),
        positions=positions,
        spec_info=VeriCacheSpecInput(len(queries), positions, queries),
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    forward.extend_seq_lens_cpu = queries
    forward.extend_prefix_lens_cpu = (prefixes + loose).tolist()
    forward.extend_seq_lens = counts
    forward.extend_prefix_lens = prefixes.to(torch.int32)
    return forward


def on_the_host(forward):
    """Make the host's lists exact again, for the CPU's backend."""
    forward.extend_prefix_lens_cpu = forward.extend_prefix_lens.tolist()
    return forward


def decode(parts, where, ids):
    """Present rows as SGLang does a decode."""
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    totals = torch.tensor([len(part) for part in parts])
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(parts),
        input_ids=ids,
        req_pool_indices=where,
        seq_lens=totals,
        seq_lens_cpu=totals,
        seq_lens_sum=int(totals.sum()),
        out_cache_loc=torch.stack([part[-1] for part in parts]).long(),
        positions=totals - 1,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def tokens(world, count):
    return torch.randint(1, 90, (count,), generator=world.random)


def kv(world):
    """Return the pool's KV but for slot 0, where tokens of no row are written."""
    buffers = world.pool.k_buffer, world.pool.v_buffer
    return torch.stack([torch.stack(layers) for layers in buffers])[:, :, 1:]


ROWS = st.lists(st.integers(1, WIDEST), min_size=1, max_size=9)


@settings(max_examples=20, deadline=None)
@given(
    batches=st.lists(st.tuples(ROWS, st.booleans()), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    loose=st.integers(0, 4),
)
def test_what_comes_out_of_a_graph_is_what_the_unpadded_batch_gives(
    batches, seed, loose
):
    world = World(seed=seed)
    server = Server(world, [1, 2, 4, 8])
    eager = 0
    for queries, plain in batches:
        counts = [1] * len(queries) if plain else queries
        where, parts = world.list_rows([n + 5 * i for i, n in enumerate(queries)])
        ids = tokens(world, sum(counts))
        if plain:
            forward, same = decode(parts, where, ids), decode(parts, where, ids)
        else:
            forward = mixed(world, parts, where, counts, ids, loose)
            same = on_the_host(mixed(world, parts, where, counts, ids))
            present(forward, server.runner.model_runner)
        logits = server.run(forward)
        wrote = kv(world)
        expected = server.run_eagerly(world.plain, same)
        assert len(logits) == sum(counts), "tokens of no row are cut off"
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)
        assert torch.equal(kv(world), wrote), "the same KV in the same slots"
        eager += len(counts) > 8 or sum(counts) > server.grid[-1]
    assert server.eager == eager
    assert len(server.replayed) == len(batches) - eager


def test_a_decode_stays_a_decode_for_whoever_samples_after_it():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    world = World()
    server = Server(world, [2])
    where, parts = world.list_rows([9, 20])
    forward = decode(parts, where, tokens(world, 2))
    before = {name: getattr(forward, name) for name in vars(forward)}
    assert len(server.run(forward)) == 2
    assert forward.forward_mode is ForwardMode.DECODE
    for name, value in before.items():
        assert getattr(forward, name) is value, name


def test_sglang_alone_would_read_past_the_end_of_a_decode():
    """Why the runner is hooked at all: a decode passes for a uniform verification."""
    world = World()
    server = Server(world, [2])
    where, parts = world.list_rows([9, 20])
    forward = decode(parts, where, tokens(world, 2))
    assert type(server.runner).can_run_graph(server.runner, forward)
    with pytest.raises(RuntimeError):
        server.runner.load_batch(forward)


def test_the_lengths_on_the_device_are_the_truth():
    world = World()
    server = Server(world, [4])
    where, parts = world.list_rows([30, 12])
    ids = tokens(world, 4)
    forward = mixed(world, parts, where, [1, 3], ids, loose=3)
    present(forward, server.runner.model_runner)
    assert forward.seq_lens.tolist() == [29, 9]
    assert forward.seq_lens.dtype == torch.int64
    assert forward.seq_lens_cpu.tolist() == [33, 15], "upper bounds of whole rows"
    layout = forward.spec_info.ragged_verify_layout
    assert layout.graph_num_tokens == 24
    assert layout.verify_lens.tolist() == [1, 3]
    for name in ("input_ids", "positions", "out_cache_loc"):
        assert getattr(forward, name)[4:].tolist() == [0] * 20, name
    assert forward.input_ids[:4].tolist() == ids.tolist()


def test_without_graphs_rows_are_presented_and_nothing_is_filled_up():
    world = World()
    server = Server(world, [4])
    model = server.runner.model_runner
    model.decode_cuda_graph_runner = None
    where, parts = world.list_rows([30, 12])
    forward = mixed(world, parts, where, [1, 3], tokens(world, 4))
    present(forward, model)
    assert len(forward.input_ids) == 4
    assert forward.spec_info.ragged_verify_layout.graph_num_tokens == 4
    model.device = "cpu"
    untouched = mixed(world, parts, where, [1, 3], forward.input_ids)
    present(untouched, model)
    assert untouched.spec_info.ragged_verify_layout is None
    assert untouched.seq_lens.tolist() == [30, 12]


@pytest.mark.parametrize(
    "case", ["rows", "tokens", "codes", "gate", "backend", "not-presented"]
)
def test_what_no_graph_serves_runs_eagerly_and_is_counted(case):
    world = World()
    server = Server(world, [1, 4])
    queries = {"rows": [1] * 5, "tokens": [6, 6, 6, 6, 1]}.get(case, [6])
    where, parts = world.list_rows([10] * len(queries))
    forward = mixed(world, parts, where, queries, tokens(world, sum(queries)))
    if case == "codes":
        forward.spec_info.coded = object()
    if case == "gate":
        forward.spec_info.gate = object()
    if case == "backend":
        server.runner.attn_backend = SimpleNamespace(supports_ragged_verify_graph=False)
    if case != "not-presented":
        present(forward, server.runner.model_runner)
    assert len(forward.input_ids) == sum(queries), "not filled up"
    assert not server.admits(forward)
    assert server.eager == 1
    assert not server.replayed


def test_a_full_graph_leaves_no_row_that_would_grow_too_long():
    """Without a dummy row, SGLang's backends give the last row the tokens to spare."""
    world = World(rows=6)
    server = Server(world, [1, 4])
    model = server.runner.model_runner
    for last, fits in ((LONGEST - 1, True), (LONGEST, False)):
        where, parts = world.list_rows([10, 10, 10, last])
        forward = mixed(world, parts, where, [1, 1, 2, 1], tokens(world, 5))
        present(forward, model)
        assert server.admits(forward) is fits
    where, parts = world.list_rows([10, 10, last])
    forward = mixed(world, parts, where, [3, 1, 1], tokens(world, 5))
    present(forward, model)
    assert server.admits(forward), "a dummy row takes them"


def test_others_servers_are_left_alone():
    world = World()
    server = Server(world, [2], name="DSPARK")
    where, parts = world.list_rows([9, 20])
    told = []

    def original(runner, forward, *args):
        told.append(forward)
        return "theirs"

    forward = decode(parts, where, tokens(world, 2))
    assert admits(original, server.runner, forward)
    assert replay(original, server.runner, forward) == "theirs"
    assert capture_input(lambda runner, n: "theirs", server.runner, 12) == "theirs"
    assert told == [forward, forward]
    assert server.eager == 0


def test_graphs_are_captured_with_rows_of_our_own_kind():
    from vericache_sglang.engine.spec_input import VeriCacheSpecInput

    server = Server(World(), [1, 4])
    spec_info = capture_input(None, server.runner, 24)
    assert isinstance(spec_info, VeriCacheSpecInput)
    layout = spec_info.ragged_verify_layout
    assert layout.verify_lens_cpu == [6] * 4
    assert server.runner._captured_ragged_layouts[24] is layout
    server.runner.ragged_verify_mode = False
    assert capture_input(lambda runner, n: n, server.runner, 24) == 24


def test_hooked_as_sglang_hooks_the_runner_serves_both_kinds(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from vericache_patches.model_executor_decode_cuda_graph_runner import HOOKS

    world = World()
    server = Server(world, [1, 4])
    runner = server.runner
    for patch, hook in HOOKS:
        name = patch.target.rpartition(".")[2]
        # Put back when the test ends.
        monkeypatch.setattr(type(runner), name, vars(type(runner))[name])
        hooks = [(HookType(patch.kind), hook, None)]
        HookRegistry._apply_target(patch.target, hooks)
    where, parts = world.list_rows([10, 20])
    for forward in (
        decode(parts, where, tokens(world, 2)),
        mixed(world, parts, where, [4, 1], tokens(world, 5)),
    ):
        if forward.extend_seq_lens_cpu:
            present(forward, runner.model_runner)
        live = forward.batch_size if forward.forward_mode.is_decode() else 5
        assert runner.can_run_graph(forward)
        assert len(runner.execute(forward).next_token_logits) == live
    assert server.replayed == [6, 6]
    assert runner.get_spec_info(6).ragged_verify_layout.graph_num_tokens == 6
