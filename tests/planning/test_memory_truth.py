"""Every formula of the memory ledger against the bytes of the real tensors.

The real constructors and functions of SGLang and of this project run on torch's meta
device (``real_tensors.py``); kernels are not launched.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops  # noqa: E402

define_missing_ops()

import real_peaks as peaks  # noqa: E402
import real_tensors as real  # noqa: E402

from vericache_sglang.config.schema import VeriCacheConfig  # noqa: E402
from vericache_sglang.planning.memory import MIB, Deployment  # noqa: E402
from vericache_sglang.planning.memory_rows import ROWS, row_bytes  # noqa: E402
from vericache_sglang.planning.models import find_model  # noqa: E402


def deployment(model, context, backend, **changes):
    given = {
        "model": find_model(model),
        "config": VeriCacheConfig(),
        "gpu_mib": 143771,
        "fraction": 0.9,
        "context": context,
        "running": 48,
        "chunk": 8192,
        "backend": backend,
        "graph_rows": 48,
        "prefill_graphs": 58,
        "kept": 0.25,
        "tail": 64,
        "scored": True,
    }
    return Deployment(**(given | changes))


DEPLOYMENTS = [
    deployment("qwen3-8b", 40960, "fa3"),
    deployment("llama-3.1-8b", 131072, "vericache"),
    deployment(
        "qwen3-32b",
        32768,
        "trtllm_mha",
        page=64,
        ranks=2,
        running=33,
        config=VeriCacheConfig(
            draft_length=31, max_verifies=3, keep=0.5, inner="ngram"
        ),
        kept=0.5,
        graph_rows=33,
    ),
    deployment(
        "llama-3.1-70b",
        16384,
        "fa3",
        config=VeriCacheConfig(inner="model", inner_length=3),
        draft=find_model("llama-3.1-8b"),
    ),
    deployment(
        "llama-3.1-8b",
        16384,
        "fa3",
        config=VeriCacheConfig(inner="eagle3"),
        draft=find_model("llama-3.1-8b"),
    ),
]

EXACT = {
    "weights": real.weights,
    "rotary table": real.rotary_table,
    "KV pool": real.kv_pool,
    "staging buffer": real.staging_buffer,
    "slot allocator": real.slot_allocator,
    "block table": lambda at: real.block_table(at).req_to_token.nbytes,
    "draft token buffer": real.token_buffer,
    "weights of the small model or head": real.draft_weights,
    "KV of the small model or head": real.draft_kv,
    "block table of the small model or head": real.draft_table,
    "logits of the small model or head": peaks.prefill_logits,
    "features that a head reads": real.features,
    "texts of an inner drafter": real.texts,
    "overlap relay": real.overlap_relay,
    "inputs of eager forwards": real.eager_inputs,
    "inputs of decode graphs": real.decode_inputs,
    "inputs of prefill graphs": real.prefill_inputs,
    "logits of decode graphs": real.logits_buffer,
    "page tables of decode graphs": real.page_tables,
    "rows of decode graphs": real.graph_rows,
    "attention scratch of splits": real.split_scratch,
    "last queries of prompts": real.query_tails,
    "scores of tokens": real.token_scores,
    "activations of a prefill": peaks.prefill_activations,
    "logits of a prefill": peaks.prefill_logits,
    "sampling copies": peaks.sampling_copies,
    "draft KV that waits for slots": peaks.draft_kv,
    "one layer being swapped in": peaks.swapped_layer,
}
"""What the bytes of a row are, by its name: all but a page or a few counters."""

AT_MOST = {"one layer being compressed": peaks.compressed_layer}
"""What the bytes of a row exceed: how much depends on the compressor."""

ESTIMATED = {
    "CUDA context",
    "modules of kernels",
    "cuBLAS workspaces",
    "attention workspaces",
    "KV indices of a prefill",
    "page table of a prefill",
    "features of a prefill",
    "CUDA graph pools",
    "buffers of collectives",
    "residual KV on its way to the host",
}
"""Bounds, and what only a device could tell; held by constants below."""


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """Launch no kernel, and find modules and ranks that only a GPU server has."""
    from sglang.srt.runtime_context import get_parallel
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: None)
    kernels = ModuleType("sgl_kernel")
    kernels.merge_state_v2 = None
    monkeypatch.setitem(sys.modules, "sgl_kernel", kernels)
    alone = SimpleNamespace(world_size=1)
    sizes = dict.fromkeys(("tp_size", "attn_tp_size", "dp_size", "moe_ep_size"), 1)
    with get_parallel().override(tp_rank=0, attn_tp_rank=0, tp_group=alone, **sizes):
        yield


@pytest.mark.parametrize(
    ("at", "row"),
    [
        pytest.param(at, row, id=f"{at.model.name}-{row.name}")
        for at in DEPLOYMENTS
        for row in ROWS
        if row.backend in ("", at.backend)
        and row.name not in ESTIMATED
        and (at.config.proposals or row.name != "texts of an inner drafter")
        and (at.draft or "small model" not in row.name)
        and (at.config.inner_head or "head reads" not in row.name)
    ],
)
def test_a_formula_gives_the_bytes_of_the_real_tensors(at, row):
    counted = row_bytes(row, at.symbols(real.SLOTS, real.STAGING))
    found = (EXACT | AT_MOST)[row.name](at)
    assert 0 < found <= counted
    exact = row.name in EXACT
    assert counted <= (1.01 * found + 4096 if exact else 1.3 * found + 64 * MIB)


def test_every_row_is_compared_or_says_that_it_is_an_estimate():
    names = {row.name for row in ROWS}
    assert names == EXACT.keys() | AT_MOST.keys() | ESTIMATED


def test_estimates_are_the_constants_of_those_who_allocate():
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention import trtllm_mha_backend

    from vericache_sglang.kv import stream_transfers

    at = DEPLOYMENTS[0]
    symbols = at.symbols(real.SLOTS, real.STAGING)
    sizes = {row.name: row_bytes(row, symbols) for row in ROWS}
    assert sizes["residual KV on its way to the host"] == stream_transfers.IN_FLIGHT
    workspaces = trtllm_mha_backend.DEFAULT_WORKSPACE_SIZE_MB * MIB
    workspaces += envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get()
    assert workspaces <= sizes["attention workspaces"] <= workspaces + 128 * MIB
