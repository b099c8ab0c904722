"""A prompt in two chunks through our backend and SGLang's Triton prefill; prints JSON.

A process of its own: Triton decides at import whether it interprets. Block table,
``KVIndexTranslator`` and ``TritonAttnBackend`` are the real ones, made in the order in
which SGLang makes them. The truth is the CPU's backend on the same pool.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
from ragged_world import DIM, HEADS, KV_HEADS, World, layer, simple_batch

from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

define_missing_ops()

from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend  # noqa: E402
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from vericache_sglang.attention.cuda_backend import RaggedAttnBackend  # noqa: E402
from vericache_sglang.config.schema import VeriCacheConfig  # noqa: E402
from vericache_sglang.planning.block_table import block_table_shape  # noqa: E402
from vericache_sglang.runtime.block_table import BlockTablePool  # noqa: E402

CONTEXT, CHUNKS = 120, (30, 25)
ROWS = (3, 1)
"""Block-table rows of the two prompts."""


def opened(world):
    """Return our backend over SGLang's, as a GPU's model runner builds them."""
    shape = block_table_shape(VeriCacheConfig(), len(ROWS) + 1, CONTEXT, 1, 1.0)
    pool = BlockTablePool(shape, CONTEXT, "cpu", enable_memory_saver=False)
    runner = SimpleNamespace(
        device="cpu",
        gpu_id=0,
        page_size=1,
        is_draft_worker=False,
        sliding_window_size=None,
        kv_cache_dtype=torch.float32,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        decode_num_tokens_per_req=lambda: 1,
        req_to_token_pool=pool,
        token_to_kv_pool=world.pool,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: world.pool),
        model_config=SimpleNamespace(
            attention_arch=AttentionArch.MHA,
            context_len=CONTEXT,
            head_dim=DIM,
            v_head_dim=DIM,
            swa_v_head_dim=None,
            kv_lora_rank=None,
            is_encoder_decoder=False,
            hf_config=LlamaConfig(),
            linear_attn_registry_result=None,
            get_max_num_attention_heads=lambda: HEADS,
            get_num_kv_heads=lambda *_: KV_HEADS,
        ),
    )
    runner.kv_index_translator = KVIndexTranslator(
        req_to_token=pool.req_to_token,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        token_to_kv_pool=world.pool,
        page_size=1,
        device="cpu",
    )
    made = RaggedAttnBackend(runner, TritonAttnBackend(runner), 1)
    # The rows are written to the table the pool has by now; the CPU's backend reads it.
    world.runner.req_to_token_pool.req_to_token = pool.req_to_token
    world.table = pool.req_to_token
    return made


def main():
    world, found = World(), {}
    ranks = get_parallel().override(attn_dcp_rank=0)
    with get_context().override_server_args(device="cpu"), ranks:
        ours = opened(world)
        slots = torch.randperm(200, generator=world.random).int() + 1
        parts = slots[: 2 * sum(CHUNKS)].split(sum(CHUNKS))
        for row, part in zip(ROWS, parts, strict=True):
            world.table[row, : len(part)] = part
        first, second = CHUNKS
        for name, end, chunk in (
            ("first", first, first),
            ("second", first + second, second),
        ):
            listed = [part[:end] for part in parts]
            batch = simple_batch("EXTEND", torch.tensor(ROWS), listed, [chunk] * 2)
            batch.mha_one_shot = False
            q, k, v = world.tokens(2 * chunk)
            ours.init_forward_metadata(batch)
            out = ours.forward(q, k, v, layer(), batch)
            indices = ours._prefill.forward_metadata.kv_indices
            prefixes = [part[: end - chunk] for part in listed]
            found[f"{name}-indices"] = indices.tolist() == torch.cat(prefixes).tolist()
            world.plain.init_forward_metadata(batch)
            wanted = world.plain.forward(q, k, v, layer(), batch)
            found[name] = float((out - wanted).abs().max())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
