"""Mixed batches and decodes through SGLang's real graph runner, and out of it again.

The runner is ``ragged_world.Runner``: SGLang's own but for the device. A graph is
played by the backend's captured metadata and the runner's static buffers, which is all
that a graph would read. The truth is the CPU's backend on the batch before that.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

from ragged_world import HEADS, KV_HEADS, WIDEST, Runner, World, layer  # noqa: E402

from vericache_sglang.runtime.algorithm import NAME, VeriCacheAlgorithm  # noqa: E402
from vericache_sglang.runtime.forward import graphs as graph_runner  # noqa: E402
from vericache_sglang.runtime.forward.graphs import (  # noqa: E402
    MixedGraphRunner,
    eager_reasons,
    graph_figures,
    logits_rows,
    present,
    runner_class,
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


class Server(Runner):
    """The graph runner of a server with VeriCache on a GPU."""

    def __init__(self, world, batch_sizes):
        super().__init__(world, batch_sizes)
        self.model = SimpleNamespace(
            spec_algorithm=VeriCacheAlgorithm(NAME, None),
            model_config=SimpleNamespace(context_len=LONGEST),
            device="cuda:0",
            device_timer=None,
            is_draft_worker=None,
            shared_read_done_event=None,
            lora_manager=None,
            hisparse_coordinator=None,
        )
        self.tables = Tables(world.dim)
        self.serve(self.model, self.layers)

    def layers(self, backend, batch):
        q, k, v = self.tables(batch.input_ids, batch.positions)
        return backend.forward(q, k, v, layer(self.world.dim), batch)

    @property
    def eager(self):
        return eager_reasons(self.model)

    def run(self, forward):
        """Run a forward as ``ModelRunner._forward_raw`` does; returns its logits."""
        if self.runner.can_run_graph(forward):
            return self.runner.execute(forward).next_token_logits
        return self.run_eagerly(self.backend, forward)

    def run_eagerly(self, backend, forward):
        backend.init_forward_metadata(forward)
        return self.layers(backend, forward)


def mixed(world, parts, where, queries, ids, pending_max=0):
    """Make the forward ``rows.build_forward`` makes on a GPU.

    The host's lists of lengths are too large by ``pending_max``.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    from vericache_sglang.runtime.forward.spec_input import VeriCacheSpecInput

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
        seq_lens_cpu=totals + pending_max,
        seq_lens_sum=int(totals.sum()) + pending_max * len(queries),
        out_cache_loc=torch.cat(tails).long(),
        positions=positions,
        spec_info=VeriCacheSpecInput(positions, queries),
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    forward.extend_seq_lens_cpu = queries
    forward.extend_prefix_lens_cpu = (prefixes + pending_max).tolist()
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
    pending_max=st.integers(0, 4),
)
def test_what_comes_out_of_a_graph_is_what_the_unpadded_batch_gives(
    batches, seed, pending_max
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
            forward = mixed(world, parts, where, counts, ids, pending_max)
            same = on_the_host(mixed(world, parts, where, counts, ids))
            present(forward, server.model)
        logits = server.run(forward)
        wrote = kv(world)
        expected = server.run_eagerly(world.plain, same)
        live = logits[: sum(counts)]
        torch.testing.assert_close(live, expected, rtol=0, atol=2e-6)
        assert torch.equal(kv(world), wrote), "the same KV in the same slots"
        eager += len(counts) > 8 or sum(counts) > server.grid[-1]
    assert sum(server.eager.values()) == eager
    assert len(server.replayed) == len(batches) - eager
    ran = {"graph_forwards": len(server.replayed), "eager_forwards": eager}
    assert graph_figures(server.model) == ran


def test_a_decode_runs_the_graph_of_a_server_without_speculation():
    """One token a row, no spec input, in a backend of its own; it stays a decode."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    world = World()
    server = Server(world, [4])
    where, parts = world.list_rows([9, 20, 30])
    forward = decode(parts, where, tokens(world, 3))
    before = {name: getattr(forward, name) for name in vars(forward)}
    ragged = server.backend.forward_metadata
    assert len(server.run(forward)) == 3
    assert server.replayed == [("DECODE", 3)]
    assert server.backend.forward_metadata is ragged
    assert forward.forward_mode is ForwardMode.DECODE
    for name, value in before.items():
        assert getattr(forward, name) is value, name


def test_the_lengths_on_the_device_are_the_truth():
    world = World()
    server = Server(world, [4])
    where, parts = world.list_rows([30, 12])
    ids = tokens(world, 4)
    forward = mixed(world, parts, where, [1, 3], ids, pending_max=3)
    present(forward, server.model)
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
    server.model.decode_cuda_graph_runner = None
    where, parts = world.list_rows([30, 12])
    forward = mixed(world, parts, where, [1, 3], tokens(world, 4))
    present(forward, server.model)
    assert len(forward.input_ids) == 4
    assert forward.spec_info.ragged_verify_layout.graph_num_tokens == 4
    assert graph_figures(server.model) == {"graph_forwards": 0, "eager_forwards": 0}
    server.model.device = "cpu"
    untouched = mixed(world, parts, where, [1, 3], forward.input_ids)
    present(untouched, server.model)
    assert untouched.spec_info.ragged_verify_layout is None
    assert untouched.seq_lens.tolist() == [30, 12]


REASONS = {
    "rows": graph_runner.TOO_LARGE,
    "tokens": graph_runner.TOO_LARGE,
    "codes": graph_runner.CODES,
    "packed": graph_runner.CODES,
    "backend": graph_runner.NOT_RAGGED,
    "not-presented": graph_runner.NOT_CAPTURED,
    "decode": graph_runner.NOT_CAPTURED,
}


@pytest.mark.parametrize("case", REASONS)
def test_what_no_graph_serves_runs_eagerly_and_says_why(case, caplog):
    world = World()
    server = Server(world, [1, 4])
    queries = {"rows": [1] * 5, "decode": [1] * 5, "tokens": [6, 6, 6, 6, 1]}
    queries = queries.get(case, [6])
    where, parts = world.list_rows([10] * len(queries))
    ids = tokens(world, sum(queries))
    forward = mixed(world, parts, where, queries, ids)
    if case == "decode":
        forward = decode(parts, where, ids)
    if case == "codes":
        forward.spec_info.coded = object()
    if case == "packed":
        forward.spec_info.packed = {0: (1, None)}
    if case == "backend":
        server.runner.attn_backend = SimpleNamespace(supports_ragged_verify_graph=False)
    if case not in ("not-presented", "decode"):
        present(forward, server.model)
    assert len(forward.input_ids) == sum(queries), "not filled up"
    for _ in range(2):
        assert not server.runner.can_run_graph(forward)
    assert server.eager == {REASONS[case]: 2}
    assert sum(REASONS[case] in line for line in caplog.messages) == 1
    assert not server.replayed


def test_a_full_graph_leaves_no_row_that_would_grow_too_long():
    """Without a dummy row, SGLang's backends give the last row the tokens to spare."""
    world = World(rows=6)
    server = Server(world, [1, 4])
    for last, eager in ((LONGEST - 1, None), (LONGEST, graph_runner.NO_SPARE_ROW)):
        where, parts = world.list_rows([10, 10, 10, last])
        forward = mixed(world, parts, where, [1, 1, 2, 1], tokens(world, 5))
        present(forward, server.model)
        assert forward.spec_info.eager == eager
        assert server.runner.can_run_graph(forward) is (eager is None)
    where, parts = world.list_rows([10, 10, last])
    forward = mixed(world, parts, where, [3, 1, 1], tokens(world, 5))
    present(forward, server.model)
    assert server.runner.can_run_graph(forward), "a dummy row takes them"


@pytest.mark.parametrize("tokens", [1, 7, 24])
def test_graphs_are_captured_with_rows_of_our_own_kind(tokens):
    from vericache_sglang.runtime.forward.spec_input import VeriCacheSpecInput

    server = Server(World(), [1, 4])
    server.runner.capture_num_tokens = [1, 7, 24]
    # As while one is captured (``capture_one_shape``).
    server.runner.captured_req_width = 1
    spec_info = server.runner.get_spec_info(tokens)
    assert isinstance(spec_info, VeriCacheSpecInput)
    layout = spec_info.ragged_verify_layout
    assert layout.graph_num_tokens == sum(layout.verify_lens_cpu) == tokens
    assert len(layout.verify_lens_cpu) == min(tokens, 4)
    assert max(layout.verify_lens_cpu) <= WIDEST
    assert server.runner._captured_ragged_layouts[tokens] is layout


def test_no_row_is_longer_than_the_graph_that_flash_attention_is_captured_for():
    """By this bound it chooses its tile; afterwards it is the longest draft again."""
    fa3 = SimpleNamespace(fa_impl_ver=3, speculative_num_draft_tokens=32)
    for tokens, bound in ((8, 8), (32, 32), (96, 32)):
        with graph_runner._longest_row(fa3, tokens):
            assert fa3.speculative_num_draft_tokens == bound
        assert fa3.speculative_num_draft_tokens == 32
    other = SimpleNamespace(speculative_num_draft_tokens=32)
    with graph_runner._longest_row(other, 8):
        assert other.speculative_num_draft_tokens == 32


def test_only_our_own_model_runner_captures_our_graphs():
    ours = SimpleNamespace(spec_algorithm=VeriCacheAlgorithm(NAME, None))
    theirs = SimpleNamespace(spec_algorithm=VeriCacheAlgorithm("DSPARK", None))
    assert runner_class(lambda _: "theirs", ours) is MixedGraphRunner
    assert runner_class(lambda _: "theirs", theirs) == "theirs"
    assert logits_rows(lambda _: 1234, theirs) == 1234


def test_decodes_are_captured_as_on_a_server_without_speculation():
    """Whatever SGLang reads meanwhile; afterwards all is as before."""
    from sglang.srt.runtime_context import get_context, get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    ours = VeriCacheAlgorithm(NAME, None)
    model = SimpleNamespace(spec_algorithm=ours)
    with get_context().override_server_args(device="cpu"):
        alone = {name: getattr(get_spec(), name) for name in graph_runner.SPECULATIVE}
    given = {
        "speculative_algorithm": NAME,
        "speculative_num_steps": 31,
        "speculative_num_draft_tokens": 32,
        "speculative_eagle_topk": 1,
    }
    with get_context().override_server_args(device="cpu"), get_spec().override(**given):
        with graph_runner._without_speculation(model):
            now = {name: getattr(get_spec(), name) for name in given}
            assert model.spec_algorithm is SpeculativeAlgorithm.NONE
        assert now == alone
        assert {name: getattr(get_spec(), name) for name in given} == given
    assert model.spec_algorithm is ours
