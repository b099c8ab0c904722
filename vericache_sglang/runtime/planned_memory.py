"""Describes a planned server to the memory ledger, without SGLang or a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vericache_sglang.compression.base import Needs
from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.memory import DEFAULT_RUNNING, Deployment
from vericache_sglang.planning.models import find_model, predictor_of
from vericache_sglang.planning.sglang_memory import (
    fraction_static,
    prefill_graph_sizes,
    tier_of,
)
from vericache_sglang.runtime.block_table import most_kept

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.planning.models import ModelShape

DRAFT_MODEL = "--speculative-draft-model-path"

FLAGS: Mapping[str, type] = {
    "context_length": int,
    "max_running_requests": int,
    "max_total_tokens": int,
    "chunked_prefill_size": int,
    "mem_fraction_static": float,
    "page_size": int,
    "tp_size": int,
    "attention_backend": str,
    "cuda_graph_max_bs_decode": int,
    "speculative_draft_model_path": str,
}
"""SGLang's flags that the ledger reads, and their types."""

BACKENDS: Mapping[int, str] = {9: "fa3", 10: "trtllm_mha"}
"""Major compute capability -> attention backend; ours on every other GPU."""

AUDITED: tuple[tuple[str, str, Mapping[str, int]], ...] = (
    ("qwen3-8b", "h200", {}),
    ("llama-3.1-8b", "h200", {}),
    ("qwen3-32b", "h100-sxm", {"context_length": 32768}),
    ("mistral-small-24b", "rtx-pro-6000", {}),
)
"""Model, GPU and flags of the deployments listed in docs/planning.md."""

TRTLLM_PAGE = 64
"""Page size that SGLang sets for trtllm_mha."""


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    """Add the SGLang flags that the ledger reads, without defaults."""
    group = parser.add_argument_group("SGLang")
    for name, kind in FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind)
    group.add_argument("--disable-cuda-graph", action="store_true")


def compression(config: VeriCacheConfig) -> dict[str, Any]:
    """Return the fields of a ``Deployment`` that follow from the compressor."""
    compressor = create_compressor(config.compressor, config.seed)
    needs = compressor.selector.needs if compressor.selector else Needs()
    return {
        "kept": most_kept(config),
        "packed": compressor.codec is not None,
        "tail": needs.q_tail,
        "scored": needs.hidden or needs.q_stream,
    }


def planned(
    model: ModelShape,
    config: VeriCacheConfig,
    gpu_mib: float,
    capability: tuple[int, int] | None,
    flags: Mapping[str, Any],
) -> Deployment:
    """Describe the server that flags would start, with default values filled in.

    Args:
        model: Shape of the model.
        config: Settings of VeriCache.
        gpu_mib: Memory of one GPU, in MiB.
        capability: Compute capability of the GPU; None: assume our own backend.
        flags: Field name -> value of SGLang's flags; missing or None: the default.

    Raises:
        ConfigError: The weights of the inner drafter are unknown, or not named.
        UnsupportedError: See ``find_model``.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    tier, ranks = tier_of(gpu_mib), given.get("tp_size", 1)
    backend = given.get("attention_backend") or (
        BACKENDS.get(capability[0], "vericache") if capability else "vericache"
    )
    chunk = given.get("chunked_prefill_size", tier.chunk)
    running = given.get("max_running_requests", DEFAULT_RUNNING)
    selector = create_compressor(config.compressor, config.seed).selector
    needs = selector.needs if selector else Needs()
    most = given.get(
        "cuda_graph_max_bs_decode",
        tier.graph_rows if ranks < 4 else tier.graph_rows_tp4,
    )
    captured = prefill_graph_sizes(chunk)
    if given.get("disable_cuda_graph"):
        most = captured = 0
    draft = None
    if config.inner == "mtp":
        draft = predictor_of(model)
    elif config.inner_weights:
        small = given.get("speculative_draft_model_path")
        if not small:
            raise ConfigError(f"--vericache-inner {config.inner} needs {DRAFT_MODEL}")
        draft = find_model(small, DRAFT_MODEL)
    fraction = fraction_static(gpu_mib, ranks, chunk, most, captured)
    # Observed phases run outside graphs (runtime/cuda_arguments.py).
    observed = needs.q_tail or needs.q_stream or needs.hidden or needs.probes
    if observed or backend == "vericache":
        captured = 0
    return Deployment(
        model=model,
        config=config,
        gpu_mib=gpu_mib,
        fraction=given.get("mem_fraction_static", fraction),
        context=given.get("context_length", model.positions),
        running=running,
        chunk=chunk,
        backend=backend,
        graph_rows=0 if needs.hidden else min(running, most),
        prefill_graphs=captured,
        ranks=ranks,
        page=given.get("page_size", TRTLLM_PAGE if backend == "trtllm_mha" else 1),
        most_slots=given.get("max_total_tokens"),
        draft=draft,
        **compression(config),
    )
