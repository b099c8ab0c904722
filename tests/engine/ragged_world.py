"""Ragged rows on a tiny pool, and SGLang's own graph runner over them without a GPU.

The runner is SGLang's ``DecodeCudaGraphRunner`` but for what needs a device: it pads,
copies, stages layouts and calls the backend as it would. A graph would replay with the
backend's metadata and buffers of the capture, so that is what ``Runner`` attends with.
"""

from types import SimpleNamespace

import torch

HEADS, KV_HEADS, DIM, SLOTS, WIDTH = 4, 2, 16, 500, 200
SCALING = 0.25
WIDEST = 6
"""Most query tokens of a row."""


def layer(dim=DIM, **changes):
    from sglang.srt.layers.radix_attention import RadixAttention

    attention = RadixAttention(HEADS, dim, SCALING, KV_HEADS, layer_id=1)
    for name, value in changes.items():
        setattr(attention, name, value)
    return attention


class World:
    """A KV pool, a row table, and the two backends that read them.

    Args:
        dim: Head dim.
        rows: Rows of the table.
        seed: Of everything random.
    """

    def __init__(self, dim=DIM, rows=12, seed=0):
        from vericache_sglang.engine.attention_backend import SlotRunAttnBackend
        from vericache_sglang.engine.cuda_attention_backend import RaggedAttnBackend
        from vericache_sglang.memory.sglang_pools import staged_pool_class

        self.random = torch.Generator().manual_seed(seed)
        self.dim = dim
        self.pool = staged_pool_class(0)(
            SLOTS,
            page_size=1,
            dtype=torch.float32,
            head_num=KV_HEADS,
            head_dim=dim,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        for buffer in [*self.pool.k_buffer, *self.pool.v_buffer]:
            buffer.copy_(torch.randn(buffer.shape, generator=self.random))
        table = SimpleNamespace(req_to_token=torch.zeros(1, 1, dtype=torch.int32))
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool, req_to_token_pool=table, device="cpu"
        )
        self.plain = SlotRunAttnBackend(self.runner)
        self.ragged = RaggedAttnBackend(
            self.runner, SlotRunAttnBackend(self.runner), WIDEST
        )
        # Enlarged after construction, as the worker does for shadow rows.
        table.req_to_token = torch.zeros(rows, WIDTH, dtype=torch.int32)
        self.table = table.req_to_token

    def list_rows(self, lengths, most=SLOTS):
        """List random slots, none twice, in random rows; returns rows and slots.

        Args:
            lengths: Of the rows, in slots.
            most: Slots from ``most`` on are left alone.
        """
        slots = torch.randperm(most - 1, generator=self.random).int() + 1
        parts = slots[: sum(lengths)].split(lengths)
        # Row 0 is what dummy rows name.
        where = torch.randperm(len(self.table) - 1, generator=self.random) + 1
        where = where[: len(lengths)]
        for index, part in zip(where.tolist(), parts, strict=True):
            self.table[index, : len(part)] = part
        return where, parts

    def tokens(self, count):
        """Return q [count, HEADS * dim], k and v [count, KV_HEADS, dim]."""
        shapes = (count, HEADS * self.dim), *[(count, KV_HEADS, self.dim)] * 2
        return [torch.randn(shape, generator=self.random) for shape in shapes]


def simple_batch(mode, where, parts, queries=None):
    """Present rows as both backends read them: ragged extends, or one query each."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    totals = [len(part) for part in parts]
    counts = queries or [1] * len(totals)
    prefixes = [total - n for total, n in zip(totals, counts, strict=True)]
    slots = [part[at:] for part, at in zip(parts, prefixes, strict=True)]
    return SimpleNamespace(
        forward_mode=ForwardMode[mode],
        batch_size=len(totals),
        input_ids=torch.zeros(sum(counts), dtype=torch.int64),
        req_pool_indices=where,
        seq_lens=torch.tensor(totals),
        seq_lens_cpu=torch.tensor(totals),
        extend_seq_lens=queries and torch.tensor(counts, dtype=torch.int32),
        extend_prefix_lens=queries and torch.tensor(prefixes, dtype=torch.int32),
        extend_seq_lens_cpu=queries,
        extend_prefix_lens_cpu=queries and prefixes,
        out_cache_loc=torch.cat(slots).long(),
        encoder_lens=None,
        spec_info=None,
    )


def layout_batch(where, parts, queries, grid):
    """Present rows as SGLang's ragged verification does, padded to a captured size.

    As in its DSPARK worker: ``seq_lens`` are those in front of the queries, totals are
    on the host only, and tokens are padded to the graph's.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    from vericache_sglang.engine.spec_input import VeriCacheSpecInput

    layout = RaggedVerifyLayout.from_verify_lens(
        verify_lens_cpu=queries, device="cpu", grid=grid
    )
    spare = layout.graph_num_tokens - sum(queries)
    totals = torch.tensor([len(part) for part in parts])
    tails = [part[len(part) - n :] for part, n in zip(parts, queries, strict=True)]
    pad = torch.nn.functional.pad
    positions = torch.zeros(layout.graph_num_tokens, dtype=torch.int64)
    spec_info = VeriCacheSpecInput(len(queries), positions, queries)
    spec_info.ragged_verify_layout = layout
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(queries),
        input_ids=torch.zeros(layout.graph_num_tokens, dtype=torch.int64),
        req_pool_indices=where,
        seq_lens=totals - torch.tensor(queries),
        seq_lens_cpu=totals,
        seq_lens_sum=int(totals.sum()),
        out_cache_loc=pad(torch.cat(tails).long(), (0, spare)),
        positions=positions,
        spec_info=spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def coded_rows(begins, exact=0):
    """Return rows with as many slots of codes; a segment for every coded one."""
    from vericache_kernels.packed_attention import KIVIStep
    from vericache_sglang.engine.coded_rows import CodedRows

    segments = [int(begin > 0) for begin in begins]
    at = torch.arange(sum(begins))
    return CodedRows(
        step=KIVIStep(2),
        begin=torch.tensor(begins, dtype=torch.int32),
        first=torch.tensor([0, *segments]).cumsum(0).int(),
        offsets=torch.arange(sum(segments) * 6).view(-1, 6) * 16,
        tokens=torch.full((sum(segments),), 32, dtype=torch.int32),
        slots=at + 1,
        key_at=at,
        value_at=at + len(at),
        exact=exact,
    )


class Runner:
    """SGLang's graph runner in ragged mode, for rows of up to ``WIDEST`` tokens.

    Args:
        world: Whose ragged backend it drives.
        batch_sizes: As ``--cuda-graph-bs``; a size has ``WIDEST`` times the tokens.
    """

    def __init__(self, world, batch_sizes):
        from sglang.srt.model_executor.cuda_graph_buffer_registry import (
            build_decode_registry,
        )
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardMode,
        )
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
            DecodeCudaGraphRunner,
        )

        self.world, self.backend = world, world.ragged
        self.runner = runner = object.__new__(DecodeCudaGraphRunner)
        runner.captured_req_width = WIDEST
        runner.capture_bs, runner.max_bs = sorted(batch_sizes), max(batch_sizes)
        runner.ragged_verify_mode = True
        runner.capture_num_tokens = runner._build_ragged_verify_token_buckets()
        runner._captured_ragged_layouts = {}
        runner._metadata_glue = None
        runner.attn_backend, runner.device = self.backend, "cpu"
        runner.capture_forward_mode = ForwardMode.TARGET_VERIFY
        runner.capture_hidden_mode = CaptureHiddenMode.NULL
        for off in (
            *("dllm_uses_input_embeds", "require_mlp_tp_gather", "require_mlp_sync"),
            *("require_attn_tp_gather", "enable_two_batch_overlap", "enable_pdmux"),
            *("is_encoder_decoder", "record_nolora_graph", "disable_padding"),
        ):
            setattr(runner, off, False)
        runner.attention_graph_variants = None
        runner.deepep_adapter = SimpleNamespace(replay=lambda: None)
        runner.model_runner = SimpleNamespace(
            lora_manager=None, hisparse_coordinator=None
        )
        tokens = max(runner.capture_num_tokens)
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        runner.seq_len_fill_value = fill
        runner.buffer_registry = build_decode_registry(
            device=torch.device("cpu"),
            max_bs=runner.max_bs,
            max_num_token=tokens,
            seq_len_fill_value=fill,
            cache_loc_dtype=torch.int64,
            share_pool=False,
        )
        slots = runner.buffer_registry
        runner.buffers = SimpleNamespace(
            mamba_track_indices=None,
            **{name: slots.get_slot(name).buffer for name in slots.slot_names()},
        )
        runner.buffers.seq_lens.fill_(fill)
        self.grid, self.captured = runner.capture_num_tokens, {}
        self.backend.init_cuda_graph_state(runner.max_bs, tokens)

    def capture(self, tokens):
        """Describe a dummy batch of a size; what a graph would keep is kept."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        from vericache_sglang.engine.spec_input import VeriCacheSpecInput

        rows = self.runner._ragged_capture_slots(tokens)

        def part(name):
            slot = self.runner.buffer_registry.get_slot(name)
            return slot.slice_for(rows, tokens)

        spec_info = VeriCacheSpecInput(rows)
        spec_info.ragged_verify_layout = self.runner._capture_ragged_verify_layout(
            tokens
        )
        batch = ForwardBatch(
            forward_mode=self.runner.capture_forward_mode,
            batch_size=rows,
            seq_lens_sum=None,
            spec_info=spec_info,
            **{
                name: part(name)
                for name in (
                    *("input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu"),
                    *("out_cache_loc", "positions"),
                )
            },
        )
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.captured[tokens] = batch, self.backend.forward_metadata
        self.backend.init_forward_metadata_in_graph(batch)

    def replay(self, batch, q, k, v):
        """Run a layer as the captured graph of the batch's size would."""
        assert self.runner.can_run_graph(batch)
        self.runner.load_batch(batch)
        tokens = batch.spec_info.ragged_verify_layout.graph_num_tokens
        captured, metadata = self.captured[tokens]
        self.backend.forward_metadata = metadata
        padded = [
            torch.cat([part, part.new_zeros(tokens - len(part), *part.shape[1:])])
            for part in (q, k, v)
        ]
        return self.backend.forward(*padded, layer(self.world.dim), captured)
