"""SlotRunAttnBackend on a tiny pool: every forward mode against a float64 oracle."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 400
SCALING = 0.25


class World:
    """A KV pool, a row table with two shadow rows, and random rows in them."""

    def __init__(self, lengths):
        from vericache_sglang.attention.cpu_backend import SlotRunAttnBackend
        from vericache_sglang.kv.sglang_pools import staged_pool_class

        random = torch.Generator().manual_seed(0)
        self.pool = staged_pool_class(0)(
            SLOTS,
            page_size=1,
            dtype=torch.float32,
            head_num=KV_HEADS,
            head_dim=DIM,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        for buffer in [*self.pool.k_buffer, *self.pool.v_buffer]:
            buffer.copy_(torch.randn(buffer.shape, generator=random))
        table = SimpleNamespace(req_to_token=torch.zeros(1, 1, dtype=torch.int32))
        self.backend = SlotRunAttnBackend(
            SimpleNamespace(token_to_kv_pool=self.pool, req_to_token_pool=table)
        )
        # Enlarged after construction, as the worker does for shadow rows.
        table.req_to_token = torch.zeros(8, 200, dtype=torch.int32)
        slots = torch.randperm(SLOTS, generator=random).int() + 1
        self.rows = slots.split([*lengths, SLOTS - sum(lengths)])[:-1]
        self.indices = torch.tensor([7, 2, 5, 1][: len(lengths)])
        for index, row in zip(self.indices.tolist(), self.rows, strict=True):
            table.req_to_token[index, : len(row)] = row

    def batch(self, mode, queries=None):
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        lengths = [len(row) for row in self.rows]
        counts = queries or [1] * len(lengths)
        tails = [row[len(row) - n :] for row, n in zip(self.rows, counts, strict=True)]
        return SimpleNamespace(
            forward_mode=ForwardMode[mode],
            req_pool_indices=self.indices,
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens_cpu=queries,
            extend_prefix_lens_cpu=queries
            and [total - n for total, n in zip(lengths, queries, strict=True)],
            out_cache_loc=torch.cat(tails).long(),
            encoder_lens=None,
            spec_info=None,
        )


def layer(**changes):
    from sglang.srt.layers.radix_attention import RadixAttention

    attention = RadixAttention(HEADS, DIM, SCALING, KV_HEADS, layer_id=1)
    for name, value in changes.items():
        setattr(attention, name, value)
    return attention


def new_tokens(count):
    random = torch.Generator().manual_seed(3)
    return (
        torch.randn(count, HEADS * DIM, generator=random),
        torch.randn(count, KV_HEADS, DIM, generator=random),
        torch.randn(count, KV_HEADS, DIM, generator=random),
    )


def oracle(world, q, counts):
    out, at = [], 0
    k_buffer, v_buffer = (
        world.pool.k_buffer[1].double(),
        world.pool.v_buffer[1].double(),
    )
    for row, n in zip(world.rows, counts, strict=True):
        for i in range(n):
            seen = row[: len(row) - n + i + 1].long()
            for head in range(HEADS):
                query = q[at, head * DIM : (head + 1) * DIM].double()
                weights = (k_buffer[seen, head // 2] @ query * SCALING).softmax(0)
                out.append(weights @ v_buffer[seen, head // 2])
            at += 1
    return torch.stack(out).view(at, HEADS * DIM)


@pytest.mark.parametrize(
    ("mode", "lengths", "queries"),
    [
        ("DECODE", [40, 1, 150], None),
        ("EXTEND", [30, 60], [30, 12]),
        ("MIXED", [30, 60, 9], [30, 1, 2]),
        ("TARGET_VERIFY", [33, 150, 70, 12], [1, 17, 1, 5]),
    ],
)
def test_every_mode_equals_the_oracle(mode, lengths, queries):
    world = World(lengths)
    counts = queries or [1] * len(lengths)
    q, k, v = new_tokens(sum(counts))
    batch = world.batch(mode, queries)
    world.backend.init_forward_metadata(batch)
    out = world.backend.forward(q, k, v, layer(), batch)
    assert torch.equal(world.pool.k_buffer[1][batch.out_cache_loc], k)
    assert torch.equal(world.pool.v_buffer[1][batch.out_cache_loc], v)
    torch.testing.assert_close(
        out.double(), oracle(world, q, counts), rtol=0, atol=2e-6
    )


def test_a_row_depends_on_itself_alone():
    together, alone = World([90, 33, 60]), World([90])
    alone.rows = together.rows[1:2]
    alone.indices = together.indices[1:2]
    alone.backend, alone.pool = together.backend, together.pool
    q, k, v = new_tokens(9)
    batch = together.batch("TARGET_VERIFY", [1, 6, 2])
    together.backend.init_forward_metadata(batch)
    mixed = together.backend.forward(q, k, v, layer(), batch)
    batch = alone.batch("TARGET_VERIFY", [6])
    alone.backend.init_forward_metadata(batch)
    single = alone.backend.forward(q[1:7], k[1:7], v[1:7], layer(), batch)
    assert torch.equal(mixed[1:7], single)


def test_idle_and_shared_kv_touch_nothing():
    world = World([20])
    q, k, v = new_tokens(1)
    idle = world.batch("IDLE")
    world.backend.init_forward_metadata(idle)
    assert world.backend.forward(q[:0], k[:0], v[:0], layer(), idle).shape == (0, 64)
    before = world.pool.k_buffer[1].clone()
    batch = world.batch("DECODE")
    world.backend.init_forward_metadata(batch)
    world.backend.forward(q, None, None, layer(), batch)
    world.backend.forward(q, k, v, layer(), batch, save_kv_cache=False)
    assert torch.equal(world.pool.k_buffer[1], before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_cross_attention": True}, "no cross attention"),
        ({"sliding_window_size": 128}, "no sliding window"),
        ({"logit_cap": 30.0}, "no logit_cap"),
        ({"v_head_dim": 8}, "no V heads wider or narrower"),
        ({"xai_temperature_len": 10}, "no temperature scaling"),
    ],
)
def test_other_attention_is_refused(change, message):
    world = World([20])
    q, k, v = new_tokens(1)
    batch = world.batch("DECODE")
    world.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match=message):
        world.backend.forward(q, k, v, layer(**change), batch)


def test_encoder_layers_and_sinks_are_refused():
    from sglang.srt.layers.radix_attention import AttentionType

    world = World([20])
    q, k, v = new_tokens(1)
    batch = world.batch("DECODE")
    world.backend.init_forward_metadata(batch)
    encoder = layer(attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(ValueError, match="no encoder_only attention"):
        world.backend.forward(q, k, v, encoder, batch)
    with pytest.raises(ValueError, match="layer 1: no sinks"):
        world.backend.forward(q, k, v, layer(), batch, sinks=torch.zeros(4))


def test_tree_verification_is_refused():
    world = World([20])
    with pytest.raises(ValueError, match="TARGET_VERIFY without extend_seq_lens_cpu"):
        world.backend.init_forward_metadata(world.batch("TARGET_VERIFY"))


def test_registering_twice_adds_one_name():
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from vericache_sglang.attention.registry import create_backend, register

    register()
    register()
    assert ATTENTION_BACKENDS["vericache"] is create_backend
    assert choices.ATTENTION_BACKEND_CHOICES.count("vericache") == 1


# -- rows that begin with codes ------------------------------------------------

SEGMENTS = (24, 8)
"""Packed tokens of each segment."""


def copied(batch):
    """Copy a batch as SGLang's runners do on the way to the attention."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import (
        CudaGraphBufferRegistry,
    )

    registry = CudaGraphBufferRegistry(
        device=torch.device("cpu"), max_bs=8, max_num_tokens=64
    )
    return registry.extract_buffer(
        padded_bs=batch.batch_size,
        padded_num_tokens=len(batch.input_ids),
        forward_batch_template=batch,
    )


def real_batch(world, queries, packed):
    """Present the rows as ``build_forward`` does, as SGLang's own ``ForwardBatch``."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from vericache_sglang.runtime.forward.spec_input import VeriCacheSpecInput

    plain = world.batch("TARGET_VERIFY", queries)
    batch = ForwardBatch(
        forward_mode=plain.forward_mode,
        batch_size=len(queries),
        input_ids=torch.zeros(sum(queries), dtype=torch.int64),
        req_pool_indices=plain.req_pool_indices,
        seq_lens=plain.seq_lens,
        seq_lens_cpu=plain.seq_lens_cpu,
        out_cache_loc=plain.out_cache_loc,
        seq_lens_sum=int(plain.seq_lens.sum()),
        spec_info=VeriCacheSpecInput(torch.zeros(sum(queries)), queries),
        extend_seq_lens_cpu=queries,
        extend_prefix_lens_cpu=plain.extend_prefix_lens_cpu,
    )
    batch.spec_info.packed = packed
    return batch


def pack_row(world, codec, row, seed):
    """Write codes into the first slots of a row, in layer 1.

    Returns:
        Slots they take, what decodes them by layer, and that as [H, t, D] pairs.
    """
    from vericache_sglang.kv.code_slots import CodeLayout
    from vericache_sglang.kv.geometry import KVGeometry

    geometry = KVGeometry(
        layers=2,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        element_bytes=4,
        page_size=1,
    )
    buffers = world.pool.k_buffer[1], world.pool.v_buffer[1]
    random, readers, near, used = torch.Generator().manual_seed(seed), [], [], 0
    for tokens in SEGMENTS:
        layout = CodeLayout(codec, geometry, torch.float32, tokens)
        (segment,), slots = layout.segments, row[used:].long()
        kv = torch.randn(2, KV_HEADS, tokens, DIM, generator=random)
        where = torch.arange(tokens)
        none = torch.empty(0, dtype=torch.int64)
        draft, _ = codec.encode(*kv, positions=where, sinks=none)
        layout.write(segment, buffers, slots, draft)
        near.append(codec.decode(draft))
        read = (layout, segment, slots, where)
        readers.append(lambda read=read: decoded(codec, buffers, *read))
        used += layout.slots

    def by_layer(layer):
        assert layer == 1
        return readers

    return used, by_layer, [torch.cat(pair, dim=1) for pair in zip(*near, strict=True)]


def decoded(codec, buffers, layout, segment, slots, where):
    return codec.decode(layout.read(segment, buffers, slots, 1, where))


def dense(world, row, q, begin, near):
    """Attend each query to what the codes decode to and the row's exact slots."""
    k_buffer, v_buffer = (
        world.pool.k_buffer[1].double(),
        world.pool.v_buffer[1].double(),
    )
    out, n = [], len(q)
    for i in range(n):
        seen = row[begin : len(row) - n + i + 1].long()
        for head in range(HEADS):
            keys, values = k_buffer[seen, head // 2], v_buffer[seen, head // 2]
            if near is not None:
                keys = torch.cat([near[0][head // 2].double(), keys])
                values = torch.cat([near[1][head // 2].double(), values])
            query = q[i, head * DIM : (head + 1) * DIM].double()
            out.append((keys @ query * SCALING).softmax(0) @ values)
    return torch.stack(out).view(n, HEADS * DIM)


CODECS = ["split-planes:exponent_bits=4,mantissa_bits=3,block=8", "turboquant:bits=3"]


@pytest.mark.parametrize("line", CODECS)
def test_a_packed_row_is_dense_attention_over_what_its_codes_decode_to(line):
    from vericache_sglang.compression.codecs.catalog import create_codec

    world, codec = World([60, 33, 50]), create_codec(line)
    first, last = (pack_row(world, codec, world.rows[i], i) for i in (0, 2))
    queries = [1, 6, 1]
    packed = {0: first[:2], 2: last[:2]}
    batch = copied(real_batch(world, queries, packed))
    q, k, v = new_tokens(8)
    world.backend.init_forward_metadata(batch)
    out = world.backend.forward(q, k, v, layer(), batch)
    for i, (rows, found) in enumerate(
        zip(q.split(queries), out.split(queries), strict=True)
    ):
        begin, _, near = {0: first, 2: last}.get(i, (0, None, None))
        wanted = dense(world, world.rows[i], rows, begin, near)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)
        if near is not None:
            without = dense(world, world.rows[i], rows, begin, None)
            assert (wanted - without).abs().max() > 0.01, "the codes do count"


def test_a_whole_row_beside_packed_ones_is_what_it_is_alone():
    from vericache_sglang.compression.codecs.catalog import create_codec

    world, codec = World([60, 33]), create_codec(CODECS[0])
    packed = {0: pack_row(world, codec, world.rows[0], 0)[:2]}
    q, k, v = new_tokens(7)
    results = []
    for listed in (packed, {}):
        batch = copied(real_batch(world, [1, 6], listed))
        world.backend.init_forward_metadata(batch)
        results.append(world.backend.forward(q, k, v, layer(), batch))
    assert torch.equal(results[0][1:], results[1][1:])
    assert not torch.equal(results[0][0], results[1][0])


def test_sglang_s_copy_of_a_batch_keeps_what_is_on_its_spec_info_alone():
    world, packed = World([20]), {0: (3, lambda layer: [])}
    batch = real_batch(world, [1], packed)
    batch.vericache_packed = packed
    copy = copied(batch)
    assert copy is not batch
    assert copy.spec_info.packed is packed
    assert not hasattr(copy, "vericache_packed"), "a plain attribute is lost"


def test_a_relay_has_no_packed_rows():
    from vericache_sglang.runtime.forward.spec_input import VeriCacheSpecInput

    one, other = VeriCacheSpecInput(), VeriCacheSpecInput()
    one.packed[0] = (3, lambda layer: [])
    assert other.packed == {}
