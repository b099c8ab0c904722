"""Every tensor that a server allocates on a GPU, as a table of formulas.

Each formula is compared with the bytes of the real tensors on torch's meta device in
``tests/planning/test_memory_truth.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Phase(Enum):
    """When a tensor is allocated, which determines from which budget."""

    LOADED = "loaded before the KV pool is sized"
    POOL = "the KV pool"
    SUBTRACTED = "allocated after it, subtracted from it"
    RESERVED = "inside the reserve that --mem-fraction-static leaves"
    PASSING = "there for a moment, seldom all at once"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One kind of tensor.

    Attributes:
        name: Description.
        phase: When it is allocated.
        formula: Bytes on one GPU, as a Python expression over ``symbols``.
        source: Where it is allocated: a symbol of SGLang, or a file of this package.
        remedy: The flag that makes it smaller, with its direction.
        backend: The attention backend that needs it; "" for all.
    """

    name: str
    phase: Phase
    formula: str
    source: str
    remedy: str = ""
    backend: str = ""


RUNNING = "lower --max-running-requests"
CONTEXT = "lower --context-length"
CHUNK = "lower --chunked-prefill-size"
DRAFTS = "lower --vericache-draft-length"
RANKS = "raise --tp-size"
STAGING = "lower --vericache-staging-tokens"
GRAPHS = "lower --cuda-graph-max-bs-decode"
WINDOW = "lower --vericache-inner-window"

_SLOT = "2 * layers * kv_heads * head_dim * number"

ROWS: tuple[MemoryRow, ...] = (
    MemoryRow(
        "CUDA context",
        Phase.LOADED,
        "1300 * MiB",
        "what an H200 lacked before the first server's weights",
    ),
    MemoryRow(
        "weights", Phase.LOADED, "weights / ranks", "ModelLoader.load_model", RANKS
    ),
    MemoryRow(
        "weights of the small model or head",
        Phase.LOADED,
        "draft_weights / ranks",
        "runtime/draft_model.py",
        "name a smaller --speculative-draft-model-path",
    ),
    MemoryRow(
        "rotary table",
        Phase.LOADED,
        "4 * max(positions, context) * head_dim",
        "RotaryEmbedding.cos_sin_cache",
        CONTEXT,
    ),
    MemoryRow("KV pool", Phase.POOL, f"{_SLOT} * (slots + page)", "MHATokenToKVPool"),
    MemoryRow(
        "staging buffer",
        Phase.POOL,
        f"{_SLOT} * staging",
        "kv/sglang_pools.py",
        STAGING,
    ),
    MemoryRow(
        "slot allocator",
        Phase.SUBTRACTED,
        "16 * slots / page",
        "TokenToKVPoolAllocator.free_pages, twice while lists are joined",
    ),
    MemoryRow(
        "block table",
        Phase.SUBTRACTED,
        "4 * rows * columns",
        "runtime/block_table.py, with draft and verification rows",
        RUNNING,
    ),
    MemoryRow(
        "draft token buffer",
        Phase.SUBTRACTED,
        "rows * (8 * (drafts + 2) + 12)",
        "runtime/forward/draft_tokens.py",
        RUNNING,
    ),
    MemoryRow(
        "texts of an inner drafter",
        Phase.SUBTRACTED,
        "(proposals > 0) * (4 * (running + 1) * (context + drafts + 2)"
        " + 4 * corpus + 8)",
        "drafters/texts.py, and finished outputs",
        RUNNING,
    ),
    MemoryRow(
        "KV of the small model or head",
        Phase.SUBTRACTED,
        "draft_token * ((running + 1) * ring + 1)",
        "runtime/draft_model.py, a ring of slots per request",
        WINDOW,
    ),
    MemoryRow(
        "features that a head reads",
        Phase.SUBTRACTED,
        "features * (running + 1) * reach",
        "drafters/features.py",
        WINDOW,
    ),
    MemoryRow(
        "block table of the small model or head",
        Phase.SUBTRACTED,
        "4 * (draft_token > 0) * (running + 1) * window",
        "runtime/draft_model.py",
        WINDOW,
    ),
    MemoryRow(
        "logits of the small model or head",
        Phase.SUBTRACTED,
        "(draft_token > 0) * running * vocab * (number + 4)",
        "LogitsProcessor, the last token of every row",
        RUNNING,
    ),
    MemoryRow("overlap relay", Phase.SUBTRACTED, "16 * rows", "FutureMap", RUNNING),
    MemoryRow(
        "inputs of eager forwards",
        Phase.SUBTRACTED,
        "48 * max(slots, chunk, running * (drafts + 1)) + 16 * running",
        "build_eager_registry",
    ),
    MemoryRow(
        "inputs of decode graphs",
        Phase.SUBTRACTED,
        "graph_tokens * (49 + number * hidden + drafts)"
        " + graph_rows * (83 + number * hidden + drafts) + 16",
        "DecodeInputBuffers, of mixed batches and of decodes",
        GRAPHS,
    ),
    MemoryRow(
        "inputs of prefill graphs",
        Phase.SUBTRACTED,
        "(prefill_graphs > 0) * (24 * chunk + 4)",
        "PrefillInputBuffers",
        CHUNK,
    ),
    MemoryRow(
        "logits of decode graphs",
        Phase.SUBTRACTED,
        "4 * graph_tokens * vocab",
        "GraphSharedOutput",
        GRAPHS,
    ),
    MemoryRow(
        "page tables of decode graphs",
        Phase.SUBTRACTED,
        "(graph_rows > 0) * (20 * graph_rows * pages + 32 * pages"
        " + graph_rows * (84 + (drafts + 1) ** 2) + 76)",
        "FlashAttentionBackend.init_cuda_graph_state",
        GRAPHS,
        "fa3",
    ),
    MemoryRow(
        "page tables of decode graphs",
        Phase.SUBTRACTED,
        "(graph_rows > 0) * (20 * graph_rows * pages + 40 * graph_rows + 64)",
        "TRTLLMHAAttnBackend.init_cuda_graph_state",
        GRAPHS,
        "trtllm_mha",
    ),
    MemoryRow(
        "attention workspaces",
        Phase.SUBTRACTED,
        "1024 * MiB",
        "TRTLLMHAAttnBackend (512 MiB) and FlashInferAttnBackend (512 MiB)",
        backend="trtllm_mha",
    ),
    MemoryRow(
        "rows of decode graphs",
        Phase.SUBTRACTED,
        "32 * (graph_rows + 1)",
        "attention/cuda_backend.py, of mixed batches and of decodes",
        GRAPHS,
        "vericache",
    ),
    MemoryRow(
        "attention scratch of splits",
        Phase.SUBTRACTED,
        "4 * (graph_tokens + mixed) * heads * 16 * (head_dim + 1)",
        "kernels/vericache_kernels/split_softmax, of a graph and without one",
        GRAPHS,
        "vericache",
    ),
    MemoryRow(
        "KV indices of a prefill",
        Phase.SUBTRACTED,
        "8 * slots",
        "TritonAttnBackend, prefixes of one batch",
        backend="vericache",
    ),
    MemoryRow(
        "last queries of prompts",
        Phase.SUBTRACTED,
        "number * min(running, slots // min_prompt) * layers * heads * tail * head_dim",
        "kv/query_tails.py",
        RUNNING,
    ),
    MemoryRow(
        "scores of tokens",
        Phase.SUBTRACTED,
        "4 * scored * layers * kv_heads * (slots + page + staging)",
        "kv/prefill_observer.py",
    ),
    MemoryRow(
        "CUDA graph pools",
        Phase.RESERVED,
        "MiB * (2 * graph_rows + 8 * prefill_graphs)",
        "reserve_for_graph_mb, SGLang's own estimate",
        GRAPHS,
    ),
    MemoryRow(
        "modules of kernels",
        Phase.RESERVED,
        "750 * MiB",
        "an H200, with graphs of a small model: loaded at first use",
    ),
    MemoryRow(
        "cuBLAS workspaces",
        Phase.RESERVED,
        "3 * 32 * MiB",
        "torch, 32 MiB a stream on Hopper",
    ),
    MemoryRow(
        "buffers of collectives",
        Phase.RESERVED,
        "(ranks > 1) * ranks * GiB / 8",
        "handle_gpu_memory_settings, SGLang's own estimate",
    ),
    MemoryRow(
        "activations of a prefill",
        Phase.RESERVED,
        "number * chunk * (4 * hidden + max(3 * mlp,"
        " (3 * heads + 4 * kv_heads) * head_dim))",
        "one decoder layer over a chunk",
        CHUNK,
    ),
    MemoryRow(
        "logits of a prefill",
        Phase.RESERVED,
        "min(running, chunk) * vocab * (number + 4)",
        "LogitsProcessor, the last token of every prompt",
        RUNNING,
    ),
    MemoryRow(
        "features of a prefill",
        Phase.RESERVED,
        "2 * features * chunk",
        "LogitsProcessor, outputs of single layers, and all of them side by side",
        CHUNK,
    ),
    MemoryRow(
        "page table of a prefill",
        Phase.RESERVED,
        "4 * running * pages",
        "FlashAttentionBackend.init_forward_metadata",
        RUNNING,
        "fa3",
    ),
    MemoryRow(
        "page table of a prefill",
        Phase.RESERVED,
        "4 * running * pages",
        "TRTLLMHAAttnBackend.init_forward_metadata",
        RUNNING,
        "trtllm_mha",
    ),
    MemoryRow(
        "sampling copies",
        Phase.PASSING,
        "40 * mixed * (vocab + 1) + 8 * vocab",
        "sampling/sampler.py, every row with top-p and a seed",
        RUNNING,
    ),
    MemoryRow(
        "one layer being compressed",
        Phase.PASSING,
        "context * (kv_heads * (5 * number * head_dim + 64) + 4 * head_dim) "
        "+ 256 * MiB",
        "prefix_cache/prompt_pieces.py: KV, residual KV; scores ranked together",
        CONTEXT,
    ),
    MemoryRow(
        "residual KV on its way to the host",
        Phase.PASSING,
        f"min(512 * MiB, {_SLOT} * context)",
        "kv/stream_transfers.py, IN_FLIGHT",
    ),
    MemoryRow(
        "draft KV that waits for slots",
        Phase.PASSING,
        f"{_SLOT} * int(kept * context)",
        "prefix_cache/compress.py, where the pool is full",
        "lower --vericache-keep",
    ),
    MemoryRow(
        "one layer being swapped in",
        Phase.PASSING,
        "2 * number * context * kv_heads * head_dim",
        "kv/stream_transfers.py, restore and bring",
        CONTEXT,
    ),
)


def row_bytes(row: MemoryRow, symbols: Mapping[str, float]) -> int:
    """Return the value of a row's formula, in bytes.

    Args:
        row: One of ``ROWS``.
        symbols: See ``Deployment.symbols``.
    """
    known = {"__builtins__": {}, "int": int, "min": min, "max": max}
    return int(eval(row.formula, known, dict(symbols)))
