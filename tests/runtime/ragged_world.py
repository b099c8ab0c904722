"""Ragged rows on a tiny pool, and SGLang's own graph runner over them without a GPU.

The runner is SGLang's ``DecodeCudaGraphRunner`` but for what needs a device: it pads,
copies, stages layouts and calls the backend as it would. A graph would replay with the
backend's metadata and buffers of the capture, so that is what ``Runner`` attends with.
"""

from collections import Counter
from contextlib import nullcontext
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
        from vericache_sglang.attention.cpu_backend import SlotRunAttnBackend
        from vericache_sglang.attention.cuda_backend import RaggedAttnBackend
        from vericache_sglang.kv.sglang_pools import staged_pool_class

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
        self.options = (self.runner, SlotRunAttnBackend(self.runner), WIDEST)
        self.ragged = RaggedAttnBackend(*self.options)
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

    from vericache_sglang.runtime.forward.spec_input import VeriCacheSpecInput

    layout = RaggedVerifyLayout.from_verify_lens(
        verify_lens_cpu=queries, device="cpu", grid=grid
    )
    spare = layout.graph_num_tokens - sum(queries)
    totals = torch.tensor([len(part) for part in parts])
    tails = [part[len(part) - n :] for part, n in zip(parts, queries, strict=True)]
    pad = torch.nn.functional.pad
    positions = torch.zeros(layout.graph_num_tokens, dtype=torch.int64)
    spec_info = VeriCacheSpecInput(positions, queries)
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


def coded_rows(begins, exact=0, queries=1):
    """Return rows with as many slots of codes; a segment for every coded one."""
    from vericache_kernels.packed_attention import KIVIStep
    from vericache_sglang.attention.codec_steps import CodecStep
    from vericache_sglang.attention.packed_readers import Images
    from vericache_sglang.attention.packed_rows import CodedRows

    segments = [int(begin > 0) for begin in begins]
    return CodedRows(
        codes=Images(
            CodecStep(KIVIStep(2)),
            offsets=torch.arange(sum(segments) * 6).view(-1, 6) * 16,
            tokens=torch.full((sum(segments),), 32, dtype=torch.int32),
            slots=torch.arange(sum(begins)) + 1,
        ),
        begin=torch.tensor(begins, dtype=torch.int32),
        first=torch.tensor([0, *segments]).cumsum(0).int(),
        exact=exact,
        queries=queries,
    )


class Graphs:
    """Stands in for SGLang's graph backend: replays what was captured, eagerly.

    Args:
        harness: The ``Runner`` that captured.
        runner: SGLang's, whose graphs these are.
        layers: Called with an attention backend and the batch of a capture, whose
            tensors are the static buffers; returns logits.
    """

    def __init__(self, harness, runner, layers):
        self.harness, self.runner, self.layers = harness, runner, layers

    def replay_session(self):
        return nullcontext()

    def replay(self, key, forward):
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        harness, backend = self.harness, self.runner.attn_backend
        captured, backend.forward_metadata = harness.captured[self.runner, key.size]
        out = self.layers(backend, captured)
        harness.replayed.append((captured.forward_mode.name, key.size))
        return LogitsProcessorOutput(next_token_logits=out)


class Runner:
    """Our graph runner of mixed batches, for rows of up to ``WIDEST`` tokens.

    Args:
        world: Whose ragged backend it drives.
        batch_sizes: A graph has ``WIDEST`` times as many tokens; the largest is also
            the most rows.
    """

    def __init__(self, world, batch_sizes):
        from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

        from vericache_sglang.runtime.forward.graphs import MixedGraphRunner

        self.world, self.backend = world, world.ragged
        self.rows = max(batch_sizes)
        self.grid = [n * WIDEST for n in sorted(batch_sizes)]
        self.runner = runner = self._bare(
            MixedGraphRunner, "TARGET_VERIFY", self.backend, self.grid, width=WIDEST
        )
        runner.ragged_verify_mode, runner.capture_num_tokens = True, self.grid
        runner._captured_ragged_layouts = {}
        runner.speculative_num_draft_tokens = WIDEST
        runner.replayed, runner.eager = 0, Counter()
        sizes = list(range(1, self.rows + 1))
        decoding = type(self.backend)(*world.options)
        runner.decodes = self._bare(
            DecodeCudaGraphRunner, "DECODE", decoding, sizes, width=1
        )
        self.captured, self.replayed = {}, []

    def _bare(self, kind, mode, backend, sizes, width):
        """Return a runner of SGLang's without its construction, which needs a GPU."""
        from sglang.srt.model_executor.cuda_graph_buffer_registry import (
            build_decode_registry,
        )
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardMode,
        )

        runner = object.__new__(kind)
        runner.captured_req_width = width
        runner.capture_bs, runner.max_bs = sizes, self.rows
        runner.ragged_verify_mode = False
        runner._metadata_glue = None
        runner.attn_backend, runner.device = backend, self.world.runner.device
        runner.capture_forward_mode = ForwardMode[mode]
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
        fill = backend.get_cuda_graph_seq_len_fill_value()
        runner.seq_len_fill_value = fill
        runner.buffer_registry = build_decode_registry(
            device=torch.device(runner.device),
            max_bs=self.rows,
            max_num_token=max(sizes),
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
        backend.init_cuda_graph_state(self.rows, max(sizes))
        return runner

    def serve(self, model, layers):
        """Capture every graph; a model's forwards run in them from now on.

        Args:
            model: SGLang's ``ModelRunner``, or what is read of it.
            layers: As of ``Graphs``.
        """
        model.decode_cuda_graph_runner = self.runner
        event = SimpleNamespace(record=lambda: None)
        for runner in (self.runner, self.runner.decodes):
            runner.model_runner = model
            runner.device_module = SimpleNamespace(Event=lambda: event)
            runner.in_graph_metadata_prep_done = None
            runner.is_dllm, runner.backend = False, Graphs(self, runner, layers)
        for tokens in reversed(self.grid):
            self.capture(tokens)
        for rows in reversed(range(1, self.rows + 1)):
            self.capture_decode(rows)

    def capture(self, tokens):
        """Describe a dummy batch of a size; what a graph would keep is kept."""
        rows = self.runner._ragged_capture_slots(tokens)
        self._capture(self.runner, rows, tokens, self.runner.get_spec_info(tokens))

    def capture_decode(self, rows):
        """The same of a decode."""
        self._capture(self.runner.decodes, rows, rows, None)

    def _capture(self, runner, rows, tokens, spec_info):
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        names = ("input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu")
        batch = ForwardBatch(
            forward_mode=runner.capture_forward_mode,
            batch_size=rows,
            seq_lens_sum=None,
            spec_info=spec_info,
            **{
                name: runner.buffer_registry.get_slot(name).slice_for(rows, tokens)
                for name in (*names, "out_cache_loc", "positions")
            },
        )
        backend = runner.attn_backend
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.captured[runner, tokens] = batch, backend.forward_metadata
        backend.init_forward_metadata_in_graph(batch)

    def replay(self, batch, q, k, v):
        """Run a layer as the captured graph of the batch's size would."""
        assert self.runner.can_run_graph(batch)
        self.runner.load_batch(batch)
        tokens = batch.spec_info.ragged_verify_layout.graph_num_tokens
        captured, metadata = self.captured[self.runner, tokens]
        self.backend.forward_metadata = metadata
        padded = [
            torch.cat([part, part.new_zeros(tokens - len(part), *part.shape[1:])])
            for part in (q, k, v)
        ]
        return self.backend.forward(*padded, layer(self.world.dim), captured)
