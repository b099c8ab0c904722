"""RaggedAttnBackend on a CPU: by the CPU's own backend, under SGLang's graph runner.

Here its kernel is the torch reference (held to the kernel in tests/kernels); rows with
codes need the kernel itself and run interpreted, in a process of their own.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

from own_process import printed  # noqa: E402
from ragged_world import (  # noqa: E402
    WIDEST,
    Runner,
    World,
    coded_rows,
    layer,
    layout_batch,
    simple_batch,
)


def run(backend, batch, q, k, v):
    backend.init_forward_metadata(batch)
    return backend.forward(q, k, v, layer(), batch)


@pytest.mark.parametrize(
    ("mode", "lengths", "queries"),
    [
        ("DECODE", [40, 1, 150], None),
        ("EXTEND", [30, 60], [30, 12]),
        ("MIXED", [30, 60, 9], [30, 1, 2]),
        ("TARGET_VERIFY", [33, 150, 70, 12], [1, 6, 1, 5]),
        ("TARGET_VERIFY", [6, 1], [6, 1]),
    ],
)
def test_every_mode_is_what_the_cpu_backend_makes_of_it(mode, lengths, queries):
    world = World()
    batch = simple_batch(mode, *world.list_rows(lengths), queries)
    q, k, v = world.tokens(sum(queries or [1] * len(lengths)))
    out = run(world.ragged, batch, q, k, v)
    assert torch.equal(world.pool.k_buffer[1][batch.out_cache_loc], k)
    assert torch.equal(world.pool.v_buffer[1][batch.out_cache_loc], v)
    expected = run(world.plain, batch, q, k, v)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_a_layout_says_the_same_as_a_ragged_extend():
    world = World()
    where, parts = world.list_rows([33, 150, 70])
    q, k, v = world.tokens(8)
    extend = simple_batch("TARGET_VERIFY", where, parts, [1, 6, 1])
    expected = run(world.ragged, extend, q, k, v)
    batch = layout_batch(where, parts, [1, 6, 1], [12])
    padded = [torch.cat([part, part[:4]]) for part in (q, k, v)]
    out = run(world.ragged, batch, *padded)
    assert torch.equal(out[:8], expected)
    assert not out[8:].any(), "tokens of no row"


# -- under SGLang's graph runner -------------------------------------------------

ROWS = st.lists(st.integers(1, WIDEST), min_size=1, max_size=8)


def pointers(metadata):
    rows = metadata.rows
    places = (rows.table, rows.row, rows.first, rows.begin, rows.end)
    return [tensor.data_ptr() for tensor in places]


@settings(max_examples=15, deadline=None)
@given(batches=st.lists(ROWS, min_size=2, max_size=4), seed=st.integers(0, 99))
def test_replays_of_any_batches_one_after_another_are_what_eager_makes(batches, seed):
    world = World(seed=seed)
    runner = Runner(world, [1, 2, 4, 8])
    for tokens in reversed(runner.grid):
        runner.capture(tokens)
    kept = {n: pointers(metadata) for n, (_, metadata) in runner.captured.items()}
    for queries in batches:
        lengths = [n + 7 * i for i, n in enumerate(queries)]
        where, parts = world.list_rows(lengths)
        q, k, v = world.tokens(sum(queries))
        batch = layout_batch(where, parts, queries, runner.grid)
        out = runner.replay(batch, q, k, v)
        plain = simple_batch("TARGET_VERIFY", where, parts, queries)
        expected = run(world.plain, plain, q, k, v)
        torch.testing.assert_close(out[: len(q)], expected, rtol=0, atol=2e-6)
        assert not out[len(q) :].any(), "tokens of no row"
    now = {n: pointers(metadata) for n, (_, metadata) in runner.captured.items()}
    assert now == kept, "a graph reads where it did when it was captured"


def test_rows_behind_the_live_ones_have_no_tokens_and_nothing_to_read():
    world = World()
    runner = Runner(world, [2, 8])
    runner.capture(12)
    for queries in ([1] * 8, [3, 1]):
        where, parts = world.list_rows([20] * len(queries))
        batch = layout_batch(where, parts, queries, runner.grid)
        runner.replay(batch, *world.tokens(sum(queries)))
    rows = runner.captured[runner.runner, 12][1].rows
    assert rows.first.tolist() == [0, 3, *[4] * 7]
    assert rows.end.tolist() == [20, 20, *[0] * 6]
    assert rows.row[:2].tolist() == where.tolist()
    assert not rows.row[2:].any()
    assert rows.row.dtype == rows.first.dtype == torch.int32


class Waits(TorchDispatchMode):
    """Refuses what would wait for a GPU: contents read on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero"), name
        return func(*args, **(kwargs or {}))


def test_describing_a_replay_reads_nothing_on_the_host():
    world = World()
    runner = Runner(world, [2])
    runner.capture(12)
    where, parts = world.list_rows([9, 9])
    batch = layout_batch(where, parts, [1, 5], runner.grid)
    with Waits():
        world.ragged.init_forward_metadata_out_graph(batch)
    batch.spec_info.coded = coded_rows([4, 0], exact=5)
    with Waits():
        world.ragged.init_forward_metadata(batch)
    assert world.ragged.forward_metadata.coded.coded.tolist() == [True, *[False] * 11]
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Waits():
        where.max().item()


def test_plain_decoding_replays_from_the_same_places():
    world = World()
    world.ragged.init_cuda_graph_state(4, 4)
    slots, lengths = world.list_rows([30, 9, 1, 1]), [30, 9]
    batch = simple_batch("DECODE", *slots)
    world.ragged.init_forward_metadata_out_graph(batch, in_capture=True)
    captured = world.ragged.forward_metadata
    batch.num_padding = 2
    batch.req_pool_indices = batch.req_pool_indices.clone()
    batch.req_pool_indices[2:] = 0
    world.ragged.init_forward_metadata_out_graph(batch)
    assert captured.rows.first.tolist() == [0, 1, 2, 2, 2]
    assert captured.rows.end.tolist() == [*lengths, 0, 0]
    world.ragged.forward_metadata = captured
    q, k, v = world.tokens(4)
    out = world.ragged.forward(q, k, v, layer(), batch, save_kv_cache=False)
    live = simple_batch("DECODE", slots[0][:2], slots[1][:2])
    world.plain.init_forward_metadata(live)
    args = (q[:2], k[:2], v[:2], layer(), live)
    expected = world.plain.forward(*args, save_kv_cache=False)
    torch.testing.assert_close(out[:2], expected, rtol=0, atol=2e-6)


# -- what SGLang asks of a backend, and what is refused --------------------------


def test_sglang_s_warm_up_without_a_spec_input_has_rows_of_one_length():
    world = World()
    where, parts = world.list_rows([20, 30])
    batch = simple_batch("TARGET_VERIFY", where, parts)
    batch.input_ids = torch.zeros(6, dtype=torch.int64)
    batch.extend_seq_lens = batch.extend_prefix_lens = None
    batch.seq_lens = batch.seq_lens - 3
    batch.out_cache_loc = torch.cat([part[-3:] for part in parts]).long()
    q, k, v = world.tokens(6)
    out = run(world.ragged, batch, q, k, v)
    plain = simple_batch("TARGET_VERIFY", where, parts, [3, 3])
    expected = run(world.plain, plain, q, k, v)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_the_scheduler_must_wait_for_the_last_layer_before_it_changes_the_table():
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = World().ragged
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        assert backend.shared_read_ends(mode) is SharedReadEnds.POST_REPLAY
    assert backend.shared_read_ends(ForwardMode.EXTEND) is SharedReadEnds.UNKNOWN
    assert backend.supports_ragged_verify_graph


PREFILL = SimpleNamespace(forward_extend=None)


def created(monkeypatch, drafts, *, deterministic=False):
    """Return the backend of a GPU server; ``drafts`` is None without speculation."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.attention import triton_backend

    from vericache_sglang.attention.registry import create_backend

    world = World()
    world.runner.device = "cuda:1"
    monkeypatch.setattr(triton_backend, "TritonAttnBackend", lambda runner: PREFILL)
    spec = SimpleNamespace(speculative_num_draft_tokens=drafts)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    mode = SimpleNamespace(enable_deterministic_inference=deterministic)
    execution = SimpleNamespace(deterministic=mode)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: execution)
    return world, create_backend(world.runner)


def test_a_device_gets_its_own_backend(monkeypatch):
    from vericache_sglang.attention.cpu_backend import SlotRunAttnBackend
    from vericache_sglang.attention.cuda_backend import RaggedAttnBackend
    from vericache_sglang.attention.registry import create_backend

    assert type(create_backend(World().runner)) is SlotRunAttnBackend
    _, backend = created(monkeypatch, 7)
    assert type(backend) is RaggedAttnBackend
    assert backend._prefill is PREFILL


def compiled(monkeypatch, drafts, queries, group, size, *, deterministic):
    """Return what the kernel is compiled for in a forward over one row."""
    from vericache_kernels.ragged_attention.triton_impl import constants
    from vericache_sglang.attention import cuda_backend as cuda_attention_backend

    world, backend = created(monkeypatch, drafts, deterministic=deterministic)
    asked = []

    def attention(q, kv, rows, scaling, *, most_queries):
        asked.append(most_queries)
        return torch.zeros_like(q)

    monkeypatch.setattr(cuda_attention_backend, "ragged_attention", attention)
    mode = "DECODE" if queries is None else "TARGET_VERIFY"
    batch = simple_batch(mode, *world.list_rows([40]), queries and [queries])
    run(backend, batch, *world.tokens(queries or 1))
    return constants("dot", size, asked[0], group, 128)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_servers_compile_one_kernel_for_every_forward(
    monkeypatch, group, size, deterministic
):
    """Decodes of plain SGLang and of ours, a draft, verifications of any length."""
    forwards = [(None, None), (32, None), (32, 1), (32, 32), (5, None), (5, 5)]
    found = [
        compiled(monkeypatch, drafts, queries, group, size, deterministic=deterministic)
        for drafts, queries in forwards
    ]
    assert found[0] == found[1] == found[4], "plain decoding is plain SGLang's"
    if deterministic:
        assert all(each == found[0] for each in found)
    elif (group, size) == (4, 2):
        assert found[0]["M"] < found[3]["M"], "otherwise decodes have smaller blocks"


def test_idle_is_nothing_and_a_forward_must_be_described():
    world = World()
    batch = simple_batch("DECODE", *world.list_rows([20]))
    q, k, v = world.tokens(1)
    with pytest.raises(ValueError, match="forward was not described"):
        world.ragged.forward(q, k, v, layer(), batch)
    idle = simple_batch("IDLE", *world.list_rows([20]))
    world.ragged.init_forward_metadata(idle)
    assert world.ragged.forward(q[:0], k[:0], v[:0], layer(), idle).shape == (0, 64)
    with pytest.raises(ValueError, match="no init_cuda_graph_state"):
        world.ragged.init_forward_metadata_out_graph(batch)
    world.ragged.init_cuda_graph_state(1, 1)
    two = simple_batch("DECODE", *world.list_rows([20, 20]))
    with pytest.raises(ValueError, match="2 rows, graphs have at most 1"):
        world.ragged.init_forward_metadata_out_graph(two)


def spec(**fields):
    fields = {"ragged_verify_layout": None, "packed": {}} | fields
    return SimpleNamespace(**fields)


def test_verifications_of_unknown_rows_are_refused():
    world = World()
    where, parts = world.list_rows([20, 30])
    tree = simple_batch("TARGET_VERIFY", where, parts)
    tree.spec_info = spec()
    with pytest.raises(ValueError, match="TARGET_VERIFY without ragged_verify_layout"):
        world.ragged.init_forward_metadata(tree)
    packed = simple_batch("TARGET_VERIFY", where, parts, [1, 1])
    packed.spec_info = spec(packed={0: (3, lambda layer: [])})
    with pytest.raises(ValueError, match=r"are read from spec_info\.coded"):
        world.ragged.init_forward_metadata(packed)


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_other_attention_is_refused_in_prefill_too(mode):
    world = World()
    queries = None if mode == "DECODE" else [1]
    batch = simple_batch(mode, *world.list_rows([20]), queries)
    q, k, v = world.tokens(1)
    world.ragged.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="no sliding window"):
        world.ragged.forward(q, k, v, layer(sliding_window_size=128), batch)
    with pytest.raises(ValueError, match="no sinks"):
        world.ragged.forward(q, k, v, layer(), batch, sinks=torch.zeros(4))


# -- rows that begin with codes --------------------------------------------------


def test_coded_rows_run_in_no_graph():
    world = World()
    runner = Runner(world, [2])
    runner.capture(12)
    batch = layout_batch(*world.list_rows([9, 9]), [1, 1], runner.grid)
    batch.spec_info.coded = coded_rows([2, 2], exact=20)
    with pytest.raises(ValueError, match="coded rows in a CUDA graph"):
        runner.replay(batch, *world.tokens(2))


@pytest.fixture(scope="module")
def interpreted():
    return printed("interpreted_cuda_backend.py")


@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [
        *("kivi", "split-planes", "kvquant", "rotatekv", "turboquant"),
        *("proposals", "heads-alike", "mixed"),
    ],
)
def test_with_the_kernels_it_is_what_the_cpu_backend_makes(interpreted, name):
    assert interpreted[name] < 5e-6


@pytest.mark.extended
def test_with_the_kernels_the_codes_do_count(interpreted):
    assert interpreted["without-codes"] > 0.01


# -- prefill, by SGLang's Triton backend -----------------------------------------


@pytest.mark.extended
def test_the_second_chunk_of_a_prompt_reads_the_first_one():
    found = printed("triton_prefill.py")
    assert found["first-indices"]
    assert found["second-indices"], "prefixes are read from another block table"
    assert max(found["first"], found["second"]) < 2e-6
