"""What SGLang's FlashAttention backend is told of our rows; prints errors as JSON.

Its metadata are its own, and its Triton kernel writes the page table, interpreted; so
this is a process of its own. Only the attention, which needs a GPU, is played: queries
of a row see its entries up to themselves, aligned at the end, as the kernel's causal
mask is. The truth is the CPU's backend on the rows before they were presented.
"""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch

from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

define_missing_ops()
sys.modules["sgl_kernel"] = ModuleType("sgl_kernel")
sys.modules["sgl_kernel"].merge_state_v2 = None

from ragged_world import DIM, HEADS, KV_HEADS, SCALING, WIDEST, World  # noqa: E402
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend  # noqa: E402
from test_graph_runner import LONGEST, Server, decode, mixed, on_the_host, tokens  # noqa: E402

from vericache_sglang.runtime.forward.graphs import present  # noqa: E402

ROWS = [[1, 6, 1, 3], [6], [1, 2, 1, 1, 1, 1, 1, 1], [1] * 7]


class FlashRows(FlashAttentionBackend):
    """The backend without its construction and its kernel."""

    def __init__(self, world):
        self.req_to_token_pool = world.runner.req_to_token_pool
        self.token_to_kv_pool = world.pool
        self.req_to_token = world.table
        self.max_context_len = LONGEST
        self.device, self.page_size, self.max_num_pages = "cpu", 1, LONGEST
        self.topk, self.speculative_step_id = 1, 0
        self.speculative_num_draft_tokens = WIDEST
        self._get_scheduler_metadata = self._verify_mask = None
        for off in (
            *("use_mla", "has_local_attention", "use_sliding_window_kv_pool"),
            *("has_swa", "is_prefill_aware_swa", "is_draft_runner"),
            *("skip_prefill", "is_encoder_decoder"),
            "_decode_uses_static_max_seqlen_k",
        ):
            setattr(self, off, False)
        self.kv_index_translator = SimpleNamespace(
            reads_are_translated=False, is_translating=False
        )

    def forward(self, q, k, v, layer, batch, **_):
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        where = KVWriteLoc(batch.out_cache_loc, None)
        self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        metadata, queries = self.forward_metadata, q.view(len(q), HEADS, DIM)
        keys = self.token_to_kv_pool.k_buffer[1]
        values = self.token_to_kv_pool.v_buffer[1]
        out = torch.zeros_like(queries)
        bounds = metadata.cu_seqlens_q.tolist()
        for row, length in enumerate(metadata.cache_seqlens_int32.tolist()):
            first, last = bounds[row], bounds[row + 1]
            slots = metadata.page_table[row, :length].long()
            for at in range(first, last):
                seen = slots[: length - last + at + 1]
                for head in range(HEADS):
                    own = head * KV_HEADS // HEADS
                    scores = keys[seen, own] @ queries[at, head] * SCALING
                    out[at, head] = scores.softmax(0) @ values[seen, own]
        return out.view(len(q), -1)


class FlashServer(Server):
    """SGLang's graph runner over that backend."""

    def __init__(self, world, batch_sizes):
        world.options = (world,)
        world.ragged = FlashRows(*world.options)
        super().__init__(world, batch_sizes)


def main():
    found = {"serves": FlashAttentionBackend.supports_ragged_verify_graph}
    for name, graphs in (("graph", True), ("eager", False)):
        world = World()
        server, worst = FlashServer(world, [1, 2, 4, 8]), 0.0
        if not graphs:
            server.model.decode_cuda_graph_runner = None
        for queries in ROWS:
            for plain in (False, True) if graphs else (False,):
                counts = [1] * len(queries) if plain else queries
                where, parts = world.list_rows([9 + n + 3 * n for n in counts])
                ids = tokens(world, sum(counts))
                if plain:
                    forward, same = (decode(parts, where, ids) for _ in range(2))
                else:
                    forward = mixed(world, parts, where, counts, ids, pending_max=2)
                    same = on_the_host(mixed(world, parts, where, counts, ids))
                    present(forward, server.model)
                if graphs:
                    logits = server.run(forward)[: sum(counts)]
                else:
                    logits = server.run_eagerly(server.backend, forward)
                wanted = server.run_eagerly(world.plain, same)
                assert logits.shape == wanted.shape
                worst = max(worst, float((logits - wanted).abs().max()))
        found[name] = worst
        found[f"{name}-replays"] = len(server.replayed)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
