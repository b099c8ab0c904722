"""The tensors of a server, made by the code that makes them, on torch's meta device.

A meta tensor has its shape and no memory. Every function takes a ``Deployment`` and
returns bytes on one GPU, in a KV pool of ``SLOTS`` slots and ``STAGING`` staging slots.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from vericache_sglang.kv.geometry import KVGeometry

META = torch.device("meta")
BF16 = torch.bfloat16
SLOTS, STAGING = 300_032, 61_440


def total(tensors):
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def peak(run, *known):
    """Return the most bytes that ``run`` has at once, besides tensors that are known.

    Args:
        run: Called once.
        known: Tensors and modules that are there before.
    """
    tracker = MemTracker()
    tracker.track_external(*known)
    before = tracker.get_tracker_snapshot()[META]["Total"] if known else 0
    with torch.no_grad(), tracker:
        run()
    return tracker.get_tracker_snapshot("peak")[META]["Total"] - before


# -- what is loaded, and the pool --------------------------------------------------


def rotary_table(at):
    from sglang.srt.environ import envs
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    head = at.model.head_dim
    with torch.device("meta"), envs.SGLANG_ROPE_CACHE_FP32.override(True):
        rotary = RotaryEmbedding(head, head, at.model.positions, 10000, True, BF16)
    return rotary.cos_sin_cache.nbytes


def weights(at):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = at.model
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.mlp,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        built = LlamaForCausalLM(config)
    return total(built.to(BF16).parameters()) // at.ranks


def pool(at, slots, staging):
    from vericache_sglang.kv.sglang_pools import staged_pool_class

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: torch.cpu)
        return staged_pool_class(staging)(
            slots,
            page_size=at.page,
            dtype=BF16,
            head_num=at.model.kv_heads // at.ranks,
            head_dim=at.model.head_dim,
            layer_num=at.model.layers,
            device="meta",
            enable_memory_saver=False,
        )


def kv_pool(at):
    built = pool(at, SLOTS, 0)
    return total([*built.k_buffer, *built.v_buffer])


def staging_buffer(at):
    built = pool(at, SLOTS, STAGING)
    return total([*built.k_buffer, *built.v_buffer]) - kv_pool(at)


def draft_weights(at):
    return weights(SimpleNamespace(model=at.draft, ranks=1))


def small_pool(at):
    """Make the pools of a small model, as the server does."""
    from vericache_sglang.drafters.model import ring_of
    from vericache_sglang.runtime.draft_model import DraftModel

    small = object.__new__(DraftModel)
    small._runner = SimpleNamespace(
        device="meta",
        kv_cache_dtype=BF16,
        tp_size=1,
        model_config=SimpleNamespace(
            head_dim=at.draft.head_dim,
            get_num_kv_heads=lambda ranks: at.draft.kv_heads,
        ),
        layer_info=SimpleNamespace(
            num_effective_layers=at.draft.layers,
            start_layer=0,
            end_layer=at.draft.layers,
        ),
        init_kv_index_translator=lambda: None,
        init_attention_backends=lambda: None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: torch.cpu)
        small.open(ring_of(at.config), at.running)
    return small


def draft_kv(at):
    held = small_pool(at)._runner.token_to_kv_pool
    return total([*held.k_buffer, *held.v_buffer])


def features(at):
    from vericache_sglang.drafters.features import Features

    size = 3 * at.model.hidden
    held = Features(at.running, at.config.ring_reach, size, BF16, "meta")
    return held.states.nbytes


def draft_table(at):
    return small_pool(at).table.nbytes


# -- after the pool ------------------------------------------------------------------


def slot_allocator(at):
    from sglang.srt.mem_cache.allocator import (
        PagedTokenToKVPoolAllocator,
        TokenToKVPoolAllocator,
    )

    options = {"dtype": BF16, "device": "meta", "kvcache": None, "need_sort": False}
    if at.page == 1:
        allocator = TokenToKVPoolAllocator(SLOTS, **options)
    else:
        allocator = PagedTokenToKVPoolAllocator(SLOTS, page_size=at.page, **options)
    return 2 * allocator.free_pages.nbytes


def block_table(at):
    from sglang.srt.mem_cache.allocation_sizing import (
        get_req_to_token_extra_context_len,
    )

    from vericache_sglang.planning.block_table import block_table_shape
    from vericache_sglang.runtime.block_table import BlockTablePool

    with pytest.MonkeyPatch.context() as patch:
        told = at.config.most_drafts + 1
        name = "sglang.srt.mem_cache.allocation_sizing"
        patch.setattr(
            f"{name}.get_spec",
            lambda: SimpleNamespace(
                speculative_algorithm="VERICACHE",
                speculative_num_steps=at.config.most_drafts,
                speculative_eagle_topk=1,
            ),
        )
        patch.setattr(f"{name}.max_speculative_num_draft_tokens", lambda: told)
        patch.setattr(f"{name}.get_alloc_page_size", lambda: at.page)
        patch.setattr(
            "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.from_string",
            lambda name: SimpleNamespace(
                is_uno=lambda: False, has_draft_kv=lambda: False
            ),
        )
        extra = get_req_to_token_extra_context_len()
    width = at.context + extra
    shape = block_table_shape(at.config, at.running, width, at.page, at.kept)
    return BlockTablePool(shape, width, "meta", False)


def token_buffer(at):
    from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer

    rows = len(block_table(at).req_to_token)
    held = DraftTokenBuffer(rows, at.config.most_drafts, "meta")._draft_tokens
    return held.tokens.nbytes + held.drafted.nbytes + held.verified.nbytes


def texts(at):
    from vericache_sglang.drafters.ngram import NgramDrafter
    from vericache_sglang.drafters.texts import Texts

    longest = at.context + at.config.most_drafts + 1
    made = Texts(at.running, longest, "meta")
    corpus = NgramDrafter(made, at.config.inner_corpus)._corpus
    return made.tokens.nbytes + corpus.tokens.nbytes + corpus.end.nbytes


def overlap_relay(at):
    from vericache_sglang.runtime.algorithm import VeriCacheAlgorithm

    relay = VeriCacheAlgorithm("X", None).create_future_map("meta", block_table(at))
    return relay.output_tokens_buf.nbytes + relay.new_seq_lens_buf.nbytes


def eager_inputs(at):
    from sglang.srt.model_executor.cuda_graph_buffer_registry import (
        build_eager_registry,
    )

    registry = build_eager_registry(
        device=META,
        max_bs=at.running,
        max_num_token=max(SLOTS, at.chunk, at.running * (at.config.most_drafts + 1)),
        cache_loc_dtype=torch.int64,
    )
    buffers = [registry.get_slot(name).buffer for name in registry.slot_names()]
    return total(buffer for buffer in buffers if buffer.device == META)


def on_meta(built):
    tensors = [value for value in vars(built).values() if torch.is_tensor(value)]
    return total(tensor for tensor in tensors if tensor.device == META)


def runners(at):
    """Return the tokens of the largest graph and of a request, of both graph runners.

    One plays mixed batches, one SGLang's own decodes.
    """
    return (at.graph_tokens, at.config.most_drafts + 1), (at.graph_rows, 1)


def decode_inputs(at):
    return sum(inputs_of(at, *runner) for runner in runners(at))


def inputs_of(at, tokens, tokens_of_request):
    from sglang.srt.model_executor.runner_utils.buffers import DecodeInputBuffers

    return on_meta(
        DecodeInputBuffers.create(
            device=META,
            max_bs=at.graph_rows,
            max_num_token=tokens,
            hidden_size=at.model.hidden,
            next_token_logits_buffer=torch.empty(0, device=META),
            dtype=BF16,
            dp_size=1,
            pp_size=1,
            is_encoder_decoder=False,
            require_mlp_tp_gather=False,
            seq_len_fill_value=1,
            encoder_len_fill_value=0,
            num_tokens_per_req=tokens_of_request,
            cache_loc_dtype=torch.int64,
            enable_mamba_track=False,
        )
    )


def prefill_inputs(at):
    from sglang.srt.model_executor.runner_utils.buffers import PrefillInputBuffers

    return on_meta(
        PrefillInputBuffers.create(
            device=META,
            max_bs=at.running,
            max_num_tokens=at.chunk,
            cache_loc_dtype=torch.int64,
            is_multimodal=False,
            hidden_size=at.model.hidden,
            dtype=BF16,
            enable_mamba_track=False,
        )
    )


def logits_buffer(at):
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput

    shared = GraphSharedOutput(device=META, max_rows=at.graph_tokens)
    return shared.get_logits_buffer(at.model.vocab, rows=1).untyped_storage().nbytes()


def graph_state(backend, at, tokens, drafts, **fields):
    built = backend.__new__(backend)
    vars(built).update(
        device="meta",
        speculative_num_draft_tokens=drafts,
        max_context_len=at.context,
        page_size=at.page,
        use_sliding_window_kv_pool=False,
        is_draft_runner=False,
        skip_prefill=False,
        topk=1,
        **fields,
    )
    built.init_cuda_graph_state(at.graph_rows, tokens)
    names = "decode_cuda_graph_metadata", "target_verify_metadata"
    tables = [getattr(built, name, {}) for name in (*names, "draft_extend_metadata")]
    return built, total(tensor for table in tables for tensor in table.values())


def page_tables(at):
    (mixed, width), (decodes, _) = runners(at)
    return tables_of(at, mixed, width) + tables_of(at, decodes, 0)


def tables_of(at, tokens, drafts):
    if at.backend == "fa3":
        from sglang.srt.layers.attention.flashattention_backend import (
            FlashAttentionBackend,
        )

        built, size = graph_state(
            FlashAttentionBackend,
            at,
            tokens,
            drafts,
            _get_scheduler_metadata=print,
            use_mla=False,
            has_local_attention=False,
            has_swa=False,
            is_encoder_decoder=False,
        )
        mask = getattr(built, "_verify_mask", None)
        size += mask.buffer.nbytes if mask else 0
        return size + built._sched_meta_buf.nbytes
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend

    pages = -(-at.context // at.page)
    none = {"_swa_kv_pool": None, "expand_encoder_only_verify": False}
    built, size = graph_state(
        TRTLLMHAAttnBackend, at, tokens, drafts, max_num_pages=pages, **none
    )
    return size


def graph_rows(at):
    from vericache_sglang.attention.cuda_backend import RaggedAttnBackend

    built = RaggedAttnBackend.__new__(RaggedAttnBackend)
    built.req_to_token_pool = block_table(at)
    built.init_cuda_graph_state(at.graph_rows, at.graph_tokens)
    return 2 * built._static.row.untyped_storage().nbytes()


def split_scratch(at):
    from vericache_kernels.ragged_attention import SPLITS, RaggedRows
    from vericache_kernels.ragged_attention.triton_impl import launch

    model, config = at.model, at.config
    others = at.running * (1 + config.proposals)
    mixed = others + min(at.running, config.max_verifies) * config.draft_length
    with torch.device("meta"):
        kv = [torch.empty(1000, model.kv_heads, model.head_dim, dtype=BF16)] * 2
        row = torch.zeros(at.graph_rows, dtype=torch.int32)
        first = torch.zeros(at.graph_rows + 1, dtype=torch.int32)
        rows = RaggedRows(block_table(at).req_to_token, row, first, row, row)
    sizes = 0
    for tokens in (at.graph_tokens, mixed):
        shape = tokens, model.heads, model.head_dim
        q = torch.empty(shape, dtype=BF16, device=META)
        attend = partial(launch, q, kv, rows, 1.0, config.most_drafts + 1, SPLITS)
        found = peak(attend, q, first)
        sizes += found - q.nbytes  # the result, which every backend has
    return sizes


def query_tails(at):
    from vericache_sglang.kv.query_tails import QueryTails

    tails = QueryTails(at.tail)
    model = at.model
    queries = torch.empty(500, model.heads // at.ranks, model.head_dim, dtype=BF16)
    batch = SimpleNamespace(
        rids=["a"], extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[500]
    )
    for layer in range(model.layers):
        tails.observe(layer, queries.to(META), batch)
    one = total(tail.rows for tail in tails.of("a").values())
    return one * min(at.running, SLOTS // at.config.min_prompt)


def token_scores(at):
    from vericache_sglang.compression.base import Needs
    from vericache_sglang.kv.prefill_observer import PrefillObserver

    built = pool(at, SLOTS, STAGING)
    places = SimpleNamespace(pool=built, geometry=geometry(at))
    with torch.device("meta"):
        return PrefillObserver(SimpleNamespace(needs=Needs()), places)._table().nbytes


def geometry(at, layers=None):
    model = at.model
    return KVGeometry(
        layers=layers or model.layers,
        kv_heads=model.kv_heads // at.ranks,
        head_dim=model.head_dim,
        v_head_dim=model.head_dim,
        element_bytes=2,
        page_size=at.page,
    )
